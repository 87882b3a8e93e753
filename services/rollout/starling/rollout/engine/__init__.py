"""Generation: prompts go in, sampled tokens with their log-probabilities and weight versions come out."""
