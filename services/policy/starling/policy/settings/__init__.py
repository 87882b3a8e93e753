"""The policy's settings, one section per file; `policy` holds the whole."""
