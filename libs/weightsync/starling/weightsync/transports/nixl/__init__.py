"""The NIXL transport: one-sided reads, for networks with RDMA."""
