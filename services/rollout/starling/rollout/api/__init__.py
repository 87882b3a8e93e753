"""OpenAI-compatible HTTP API of a replica, for clients and for the programs of episodes."""
