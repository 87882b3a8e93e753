"""Simulated clusters: the real cores of all four services in simulated time, under faults, with checks."""
