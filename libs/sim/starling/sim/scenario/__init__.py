"""Scenarios: the values that determine a simulated run."""
