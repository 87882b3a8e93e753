"""Publishing: snapshots of a rank's shards, and what changed from one to the next."""
