"""Generation engines: prompts in, sampled tokens with their log-probabilities and weight versions out."""
