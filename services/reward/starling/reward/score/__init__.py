"""Scoring: the scorers, and the worker processes that run them."""
