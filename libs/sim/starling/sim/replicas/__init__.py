"""Replicas."""
