"""Training: a model, batches made of trajectories, and the step that turns them into a new version."""
