"""Pipeline parallelism: ranks divide the blocks of a model."""
