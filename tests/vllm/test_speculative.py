"""Speculative decoding changes neither the distribution of tokens nor their log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import checkpoint, engine_driver, forward_logprobs, read_model, request

from starling.rollout.engine.base import RequestError

DRAFT = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_logprobs_equal_a_forward_pass(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "qwen3", 0)
    model, prompt = read_model(folder), [1, 2, 3, 4] * 6
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.3},
    ]
    with engine_driver(folder, load_weights=True, vllm={"speculative": DRAFT}) as engine:
        asked: dict[str, Any] = {"max_tokens": 60, "score_prompt": True}
        for refused in ({"routing": "replayed"}, {"logprobs": "truncated", "top_k": 5}, {"min_p": 0.1}):
            with pytest.raises(RequestError, match=r"or remove rollout\.vllm\.speculative"):
                engine.engine.add(request("refused", prompt, **refused))
        results = [engine.generate(prompt, 3, **asked, **sampling) for sampling in samplings]
    for sampling, result in zip(samplings, results, strict=True):
        assert result.prompt_logprobs is not None
        expected = forward_logprobs(model, prompt[:1], prompt[1:])
        np.testing.assert_allclose(result.prompt_logprobs.logprobs, expected, atol=1e-5)
        for completion in result.completions:
            sampled = completion.token_ids.tolist()
            assert len(sampled) == len(completion.logprobs) == 60
            assert (completion.versions == 0).all()
            expected = forward_logprobs(model, prompt, sampled, sampling["temperature"])
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
    greedy = results[0].completions[0].token_ids.tolist()
    for at in (0, 20, 59):  # each the likeliest of all
        every = [forward_logprobs(model, prompt + greedy[:at], [token])[0] for token in range(96)]
        assert int(np.argmax(every)) == greedy[at]
