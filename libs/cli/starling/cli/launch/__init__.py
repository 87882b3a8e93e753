"""Launchers: place replicas through an existing engine, tell when they end, stop them; they never schedule."""
