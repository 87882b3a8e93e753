"""Estimates of throughput and staleness for other numbers of replicas and durations."""
