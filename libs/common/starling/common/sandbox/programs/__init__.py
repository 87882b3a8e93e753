"""Programs that a model wrote, inside their sessions: what is executed by kind, and calls between two sessions."""
