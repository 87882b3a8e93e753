"""Attention over a packed row of segments that form a forest: no dense mask, memory linear in tokens."""
