"""Quantise at the source: only the quantised bytes and their scales travel, equal to quantising the full tensor.

`formats` and `spec` describe the formats and do the geometry; `recipe` says what is quantised, `layouts` (and
`arrange`) what then travels, `schedule` which maxima ranks tell one another: all without torch. `amax`, `codes` and
`tensors` compute with torch; `source` quantises what a rank publishes, `exchange` brings it the maxima of the others.
"""
