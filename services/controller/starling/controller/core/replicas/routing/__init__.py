"""Routing of work (stop 2 of the walk): free slots, expected lengths and speeds, and the earliest finish."""
