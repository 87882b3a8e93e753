"""Planner: layouts, topology, plans, fan-out, estimates and offers. Pure, except `detection`."""
