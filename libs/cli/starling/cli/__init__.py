"""The `starling` command and the supervisor of a run on one machine."""
