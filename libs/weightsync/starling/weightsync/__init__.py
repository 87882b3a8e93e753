"""Moves tensors peer to peer: layouts, plans, snapshots, transports and digests."""
