"""What supervised steps are made of: prompts of the wire become token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from starling.algo.text import encode_prompt, encode_response
from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt
from starling.policy.train.groups import Example, IntArray
from starling.policy.train.pairs import Pair


def examples_of(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Example]:
    """Encode `prompts` with their references. Raises ConfigError that names one without."""
    return [
        Example(_ids(encode_prompt(tokenizer, prompt)), _ids(encode_response(tokenizer, prompt)), prompt.id)
        for prompt in prompts
    ]


def pairs_of(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Pair]:
    """Encode `prompts` with their references, the chosen responses, and the rejected ones.

    Raises:
        ConfigError: names a prompt that lacks one of the two, or has twice the same.
    """
    return [
        Pair(
            _ids(encode_prompt(tokenizer, prompt)),
            _ids(encode_response(tokenizer, prompt)),
            _ids(encode_response(tokenizer, _rejected(prompt))),
            prompt.id,
        )
        for prompt in prompts
    ]


def _rejected(prompt: Prompt) -> Prompt:
    if not prompt.rejected:
        raise ConfigError(f"pair {prompt.id!r} has no rejected response; name its column in data.rejected_column")
    return msgspec.structs.replace(prompt, reference=prompt.rejected)


def _ids(tokens: Sequence[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)
