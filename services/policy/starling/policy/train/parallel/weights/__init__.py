"""A rank's parts of whole tensors: for the optimizer, for states and for exports."""
