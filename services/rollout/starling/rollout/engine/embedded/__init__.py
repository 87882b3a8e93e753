"""The engine `transformers`: continuous batching over a Hugging Face model, inside the rollout's own process."""
