"""The rollout's hands: the line to the controller, the engine, the puller."""
