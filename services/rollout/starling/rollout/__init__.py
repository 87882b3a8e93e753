"""The rollout: generates completions and adopts new weights between two tokens."""
