"""Invariants and guarantees that every simulated run is checked against."""
