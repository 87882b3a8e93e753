"""Data of a run: datasets, the stream of prompts from their rows, and trajectory files."""
