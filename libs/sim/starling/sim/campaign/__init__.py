"""Campaign."""
