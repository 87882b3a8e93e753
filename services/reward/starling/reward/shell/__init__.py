"""Shell of the reward service: the link to the controller, and the pool of workers."""
