"""Saved states, exports in Hugging Face format, and the storage of both."""
