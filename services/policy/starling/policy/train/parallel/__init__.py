"""Training on a mesh of ranks: `apply` puts a model on it; each axis and each concern has a file or a package."""
