"""Decides: which groups are being scored, and what their rewards are."""
