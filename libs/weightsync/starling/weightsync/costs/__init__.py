"""Time and memory of weight synchronisation: estimated before a transfer, and measured afterwards. Pure."""
