"""Client of reward services: rewards of texts, pixels and latents, for any trainer."""
