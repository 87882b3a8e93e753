"""Campaigns of simulated runs, and shrinking of their failures."""
