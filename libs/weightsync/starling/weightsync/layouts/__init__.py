"""Makers of layouts: live modules, checkpoints, engines' workers, and models that exist only as a configuration."""
