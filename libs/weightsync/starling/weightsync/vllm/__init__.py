"""vLLM's workers: recorded layouts, adoption of versions, and the backend `starling` of vLLM's weight transfer."""
