"""The reward service's hands: the line to the controller, and the pool of workers."""
