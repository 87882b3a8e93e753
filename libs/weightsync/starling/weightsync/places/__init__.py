"""Detection of the place of a process: machine, NUMA node, GPU, network cards. Reads files only."""
