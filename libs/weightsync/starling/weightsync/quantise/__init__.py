"""Quantise at the source: only the quantised bytes and their scales travel, equal to quantising the full tensor.

`formats` and `spec` describe the formats and do the geometry, without torch. `amax`, `codes` and `tensors` compute with
torch; who holds weights imports them.
"""
