"""Datasets: where rows come from, and how rows become the endless stream of prompts of a run."""
