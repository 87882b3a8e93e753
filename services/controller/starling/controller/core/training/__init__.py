"""Training steps: dispatch and commit, saved states, dynamic settings, alarms, metrics and samples."""
