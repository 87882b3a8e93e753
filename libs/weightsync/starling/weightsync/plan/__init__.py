"""Planner: layouts, topology, plans and fan-out. Pure."""
