"""Profiles of the processes of a run."""
