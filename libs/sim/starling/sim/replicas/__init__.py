"""Simulated replicas of each role, around the real cores."""
