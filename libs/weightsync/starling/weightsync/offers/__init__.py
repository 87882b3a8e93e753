"""Offers: where a weight version can be read, what proves it, and the tickets that open it. Pure."""
