"""Layouts of checkpoints, of engine workers, and of models that exist only as a configuration. Without torch."""
