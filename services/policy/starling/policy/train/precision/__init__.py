"""Matrix products in fewer bits than the weights have."""
