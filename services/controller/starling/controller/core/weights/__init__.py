"""Weight versions: publications, the rollouts that hold or need them, and their distribution."""
