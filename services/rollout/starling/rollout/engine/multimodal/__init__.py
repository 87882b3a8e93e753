"""Multimodal."""
