"""Training on a mesh of ranks."""
