"""Reinforcement learning of diffusion models: the steps of a sampler as actions of a policy."""
