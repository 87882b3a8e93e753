"""Profiles of a process, armed while it runs: spans, torch's profiler, memory snapshots and flame graphs."""
