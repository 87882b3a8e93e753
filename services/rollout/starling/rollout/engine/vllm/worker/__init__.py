"""Code that runs in vLLM's worker processes: the weights they pull, their samplers, adapters and kernels."""
