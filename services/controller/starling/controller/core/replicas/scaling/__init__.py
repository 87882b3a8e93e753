"""Scaling of a run: desired numbers of replicas, the rule of `autoscale`, and the draining of surplus replicas."""
