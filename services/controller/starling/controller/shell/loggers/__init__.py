"""Where metrics go besides `metrics.jsonl`: one file per kind of logger, each on a thread of its own."""
