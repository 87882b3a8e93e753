"""Sandbox of processes that run user code, or code that a model wrote: namespaces, limits, and the end of all of it."""
