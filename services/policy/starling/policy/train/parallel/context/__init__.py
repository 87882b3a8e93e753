"""Context parallelism: ranks divide the tokens of a row."""
