"""Evaluations of published versions: when one is due, the rollouts that it pins, and its results."""
