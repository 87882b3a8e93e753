"""State machine of a rollout replica: when to generate, pull and switch weights."""
