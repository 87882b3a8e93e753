"""A simulated cluster: the real cores of all four services on simulated time, and what must hold of them."""
