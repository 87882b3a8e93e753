"""Loggers of metrics and samples besides `metrics.jsonl`, one file per kind, each logger in its own thread."""
