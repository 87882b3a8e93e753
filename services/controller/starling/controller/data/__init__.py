"""Data of a run: datasets, the stream of prompts made from their rows, and trajectory files."""
