"""Stop 4 of the walk, interact: what stands between a completion and its trajectory."""
