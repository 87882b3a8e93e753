"""Protocols of reward services: requests and replies as bytes, without a connection."""
