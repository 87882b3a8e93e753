"""Vocabulary size of the small models of these tests."""

VOCABULARY = 31
