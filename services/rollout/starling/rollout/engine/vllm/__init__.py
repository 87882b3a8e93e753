"""The engine `vllm`: AsyncLLM in a thread, and in each of its workers a destination of the weights."""
