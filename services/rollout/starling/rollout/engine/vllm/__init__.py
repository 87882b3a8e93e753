"""The engine `vllm`: AsyncLLM in a thread of the rollout, and in `worker/` what runs inside vLLM's own processes."""
