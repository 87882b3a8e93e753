"""The simulated cluster: the controller's host, the operator, the replicas and their faults."""
