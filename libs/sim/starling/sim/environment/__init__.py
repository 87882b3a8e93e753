"""The simulated environment: time, network and disk."""
