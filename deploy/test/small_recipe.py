"""Recipe of a small run that lasts until it is stopped, and its data, for the tests that look at a run from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

SMALL_RUN: Final = """
[network]
heartbeat_s = 0.3
connect_s = 300.0

[model.scratch]
alphabet = "abcdefghijklmnopqrstuvwxyz>"
max_length = 24

[model.scratch.config]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
tie_word_embeddings = true

[data]
source = "prompts.jsonl"
format = "{question}>"
held_out = 4

[rl]
num_steps = 1000000
prompts_per_step = 4
group_size = 4
max_staleness = 2

[sampling]
max_tokens = 6
"""
"""To be followed by further sections, such as those of the run's name and its scorers."""


def write_prompts(folder: Path) -> None:
    """Write the data of `SMALL_RUN`."""
    words = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]
    rows = (json.dumps({"question": word, "answer": word[::-1]}) for word in words)
    (folder / "prompts.jsonl").write_text("".join(f"{row}\n" for row in rows))
