"""The reward service: scores trajectories in killable worker processes."""
