"""Puller."""
