"""Quantisation at the source: only quantised bytes and scales are sent, equal to quantising the full tensor.

`formats` and `spec` define the formats and their geometry, `recipe` selects the tensors, `layouts` describes what is
then published and received, `schedule` which maxima the ranks exchange: all without torch. The computation is in
`weightsync.tensors`: `codes`, `quantise` and `quantiser`.
"""
