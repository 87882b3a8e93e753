"""Peer-to-peer synchronisation of weights: layouts, plans, snapshots, transports and digests."""
