"""Optimizers, master weights, learning-rate schedules."""
