"""Nodes of a replica on several hosts: node 0 is its service, and the others are agents with child processes."""
