"""Sizes of tiny random models, as fields of their configurations."""

from __future__ import annotations

from typing import Any

CONTEXT = 256
VOCAB = 96
# Wide initial weights: attention and positions then decide the logits, and an error in either shows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED: dict[str, Any] = {
    **SMALL,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
WIDE: dict[str, Any] = {key: value for key, value in GROUPED.items() if key != "head_dim"} | {"hidden_size": 128}
"""Heads of size 32 by the hidden size."""
PLAIN: dict[str, Any] = {
    key: value for key, value in GROUPED.items() if key not in ("head_dim", "num_key_value_heads")
} | {"hidden_size": 128}
"""One key-value head for each head, of size 32."""
