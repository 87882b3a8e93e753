"""Replicas: membership, leases, free slots and routing, time sharing of devices, reclaimed and failed work."""
