"""The backend `starling` of vLLM's weight transfer: workers pull their shards from the ranks of a trainer."""
