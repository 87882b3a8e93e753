"""Sandbox: processes that run user code for tools and gym."""
