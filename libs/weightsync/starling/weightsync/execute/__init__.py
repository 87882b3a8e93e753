"""The parts that touch memory: snapshots, readers and writers of tensors, one file per transport."""
