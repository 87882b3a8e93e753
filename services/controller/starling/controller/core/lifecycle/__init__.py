"""Lifecycle of a run: its stages, its end, and the commands of operators."""
