"""Pairs of responses for recipes/dpo.toml: a word spelled backward, and the same with two letters swapped."""

from __future__ import annotations

import random


def pairs() -> list[dict[str, str]]:
    """Return the rows: prompt, chosen, rejected."""
    from reasoning_gym.factory import create_dataset

    generator = random.Random(0)
    rows = []
    for entry in create_dataset("spell_backward", seed=1, size=4000, min_word_len=3, max_word_len=6):
        word, right = entry["metadata"]["word"], entry["answer"]
        places = [at for at in range(len(right) - 1) if right[at] != right[at + 1]]
        if places:
            at = generator.choice(places)
            wrong = right[:at] + right[at + 1] + right[at] + right[at + 2 :]
            rows.append({"prompt": f"{word}>", "chosen": right, "rejected": wrong})
    return rows
