"""Training of diffusion models: the steps of denoising trajectories are the tokens of a step."""
