"""Lossless deltas: the changed elements of a piece from one version to the next, encoded as bytes. Pure numpy."""
