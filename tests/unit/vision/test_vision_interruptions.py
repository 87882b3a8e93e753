"""Completions of prompts with images resume after an interruption, and after their KV cache is recomputed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vision import FAMILIES, ask, image, make_encoder, make_model, write_folder

from starling.common.wire.messages import Sampling
from starling.rollout.engine.base import GroupRequest, GroupResult
from starling.rollout.engine.embedded.engine import TransformersEngine

torch.set_num_threads(1)


def requests(folder: Path, family: str) -> list[GroupRequest]:
    """Return requests for two prompts with images of different sizes, and for one without."""
    encoder = make_encoder(write_folder(folder, family, weights=False), make_model(family))
    prompts = (ask("a<image>b?", image(40, 12)), ask("bc"), ask("<image>a<image>", image(16, 16), image(20, 30)))
    made = []
    for number, prompt in enumerate(prompts):
        ids, tensors = encoder.encode(prompt)
        made.append(GroupRequest(str(number), ids, 2, Sampling(max_tokens=9, seed=number), tensors))
    return made


def finish(engine: TransformersEngine) -> dict[str, GroupResult]:
    results: dict[str, GroupResult] = {}
    while engine.ready:
        for ended in engine.step():
            assert isinstance(ended, GroupResult)
            results[ended.lease] = ended
    return results


def same(ours: dict[str, GroupResult], theirs: dict[str, GroupResult]) -> None:
    assert ours.keys() == theirs.keys()
    for lease, result in ours.items():
        for a, b in zip(result.completions, theirs[lease].completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_completions_equal_uninterrupted_ones(tmp_path: Path, family: str) -> None:
    asked = requests(tmp_path, family)
    whole, first, second = (TransformersEngine(make_model(family), eos_token_ids=()) for _ in range(3))
    for one in asked:
        whole.add(one)
        first.add(one)
    expected = finish(whole)
    for _ in range(4):
        first.step()
    for one in asked:
        partials = first.interrupt(one.lease)
        assert partials is not None
        second.add(replace(one, partial=partials))
    second.step()
    second._recompute()  # by the same weights
    same(finish(second), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_cache_equals_a_fresh_start(tmp_path: Path, family: str) -> None:
    asked = requests(tmp_path, family)
    engine = TransformersEngine(make_model(family), eos_token_ids=())
    fresh = TransformersEngine(make_model(family, seed=1), eos_token_ids=(), version=1)
    for one in asked:
        engine.add(one)
    for _ in range(4):
        engine.step()
    rows = {int(group): [] for group in engine._rows.table["group"]}
    for row, record in enumerate(engine._rows.table):
        rows[int(record["group"])].append(engine._rows.partial(row, None))
    for number, one in enumerate(asked):
        fresh.add(replace(one, partial=tuple(rows[number])))
    with torch.no_grad():
        for name, tensor in engine.tensors().items():
            tensor.copy_(fresh.tensors()[name])
    engine.set_version(1)
    assert engine._recompute() == sum(2 * (len(one.prompt_ids) + 3) for one in asked)
    same(finish(engine), finish(fresh))
