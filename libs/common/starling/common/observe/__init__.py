"""Logs, process title and exit of a service process."""
