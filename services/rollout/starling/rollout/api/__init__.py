"""The OpenAI-compatible endpoint: for agents whose calls become trajectories, and for whoever else asks."""
