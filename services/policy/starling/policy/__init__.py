"""The policy service: trains a model and publishes its weight versions."""
