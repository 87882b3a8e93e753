"""Lossless deltas: what changed in one piece from one version to the next, as bytes that travel instead."""
