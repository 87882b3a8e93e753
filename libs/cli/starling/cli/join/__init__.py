"""`starling join`: a replica joins a running job from a machine that has a key and nothing else."""
