"""The trained model: loading, adapters, its output layer, the reference model."""
