"""Scorers of pixels and latents: measures of images and videos, without any model."""
