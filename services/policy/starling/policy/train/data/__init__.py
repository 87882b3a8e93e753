"""Data of a step: scored groups, examples and pairs, and their packing into microbatches."""
