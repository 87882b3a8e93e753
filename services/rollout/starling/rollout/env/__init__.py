"""Environments: episodes of user code between a completion and its trajectory."""
