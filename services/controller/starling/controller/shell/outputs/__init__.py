"""Files of the run that the controller writes: metrics and samples, trajectories, and traces."""
