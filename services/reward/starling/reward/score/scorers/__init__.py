"""Scorers: one file per built-in scorer, and the registry of names."""
