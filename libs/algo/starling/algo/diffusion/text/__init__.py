"""Text embeddings of prompts: computed by a pipeline's text encoders, kept on disk, or read from files of a dataset."""
