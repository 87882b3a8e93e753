"""The wire: every message that services exchange, its encoding, and its recorded schema."""
