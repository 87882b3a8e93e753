"""Prompts with images and videos: loading the media, and encoding them for vision-language models."""
