"""Shell of the rollout: the link to the controller, the engine, and the adoption and publication of weights."""
