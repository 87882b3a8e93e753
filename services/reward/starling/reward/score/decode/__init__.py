"""Decoding of latents to pixels, once for all scorers that read pixels."""
