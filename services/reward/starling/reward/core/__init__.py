"""State machine of the reward service: groups in progress and their rewards."""
