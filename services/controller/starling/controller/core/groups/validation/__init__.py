"""Validation of what replicas report of a group: results, recordings and scores, and the limits on their size."""
