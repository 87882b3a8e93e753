"""Worker processes that run the scorers, and can be killed."""
