"""Flat memory: arrays in it, digests of it, buffer pools, and snapshots in shared memory. No torch."""
