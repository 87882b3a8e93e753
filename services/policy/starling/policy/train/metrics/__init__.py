"""Metrics of a step: per-token statistics, FLOPs, phases, change of the weights."""
