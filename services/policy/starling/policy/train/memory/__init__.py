"""Memory savings: activation checkpointing, offload, compiled blocks."""
