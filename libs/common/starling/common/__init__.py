"""Shared by all services: ids, errors, settings, wire and network."""
