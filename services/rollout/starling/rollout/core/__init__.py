"""What the rollout decides: when to generate, pull and switch."""
