"""The policy: learns from trajectories and publishes weight versions."""
