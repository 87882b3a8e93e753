"""Torch side of layouts, deltas, quantisation and adapters: everything that computes on tensors."""
