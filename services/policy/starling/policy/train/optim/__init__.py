"""Optim."""
