"""Engine of diffusion models: a completion is a denoising trajectory."""
