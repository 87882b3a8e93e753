"""Pulling: reading a version from its sources, switching to it, attesting it, relaying it."""
