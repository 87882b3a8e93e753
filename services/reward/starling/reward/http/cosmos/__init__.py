"""Routes that clients of Cosmos-RL's reward service use, beside the service's own."""
