"""Metrics of a run for Prometheus, served by the controller's HTTP endpoint."""
