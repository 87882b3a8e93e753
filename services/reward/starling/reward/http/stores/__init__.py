"""Stores of requests and results: in memory, in an SQLite file, in Redis."""
