"""Nixl."""
