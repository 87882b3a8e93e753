"""Rollout, policy and the plain model compute the same for prompts with images, packed or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vision import FAMILIES, ask, generate, image, make_encoder, make_model, write_folder, write_video
from torch import Tensor

from starling.algo.architecture import placeholders
from starling.common.wire.messages import Media, ScoredTrajectory, TrainGroup
from starling.policy.train.data.groups import ScoredGroup, groups_from_wire
from starling.policy.train.data.packing import PackedBatch, PromptBlock, pack_sequences, to_tensors
from starling.policy.train.model.layout import attention_plan
from starling.policy.train.model.lm_head import trained_logits
from starling.rollout.engine.base import GroupResult
from starling.rollout.shell.results import generated_message

torch.set_num_threads(1)


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A model, and groups sampled with it, some from prompts with images."""

    model: Any
    groups: list[ScoredGroup]

    @property
    def token_ids(self) -> np.ndarray[Any, Any]:
        return np.concatenate([group.completion_ids for group in self.groups])

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities of the rollout, of all tokens."""
        return torch.from_numpy(np.concatenate([group.logprobs for group in self.groups]))

    def prompted(self) -> list[PromptBlock]:
        """Return the prompted sequences of the policy's batch."""
        made, end = [], 0
        for group in self.groups:
            ends = end + np.cumsum(group.lengths)
            spans = tuple(zip((ends - group.lengths).tolist(), ends.tolist(), strict=True))
            made.append(PromptBlock(group.prompt_ids, spans, group.extra))
            end = int(ends[-1])
        return made


def as_the_policy_reads(result: GroupResult) -> ScoredGroup:
    """Send `result` over the wire."""
    message, buffers = generated_message(result, str)
    trajectories = tuple(
        ScoredTrajectory(num_tokens=meta.num_tokens, oldest_version=meta.oldest_version, reward=0.0)
        for meta in message.trajectories
    )
    train = TrainGroup(prompt_id=result.lease, trajectories=trajectories, tensors=message.tensors)
    return groups_from_wire([train], buffers)[0]


def sample(folder: Path, family: str, **changes: Any) -> Sampled:
    model = make_model(family, **changes)
    encoder = make_encoder(write_folder(folder, family, weights=False), model)
    video = Media(kind="video", uri=write_video(folder / "video", 24, 16, 9), fps=2.0)
    prompts = {
        "wide": ask("a<image>b?", image(40, 12)),
        "text": ask("bc"),
        "several": ask("<image>a<video>b<image>", image(16, 16, 1), video, image(20, 30, 2)),
        "long text": ask("abcdefgh" * 4),
        "tall": ask("<image>", image(8, 32, 3)),
    }
    with torch.no_grad():
        results = generate(model, encoder, prompts, count=3)
    return Sampled(model, [as_the_policy_reads(results[lease]) for lease in prompts])


def packed_logprobs(model: Any, batch: PackedBatch) -> Tensor:
    """Return the log-probabilities of the step's tokens, in their order."""
    found = torch.full((len(batch.token_ids),), torch.nan, dtype=model.dtype)
    for microbatch in batch.plan:
        inputs = to_tensors(batch, microbatch)
        logprobs = trained_logits(model, inputs).log_softmax(-1).gather(-1, inputs.targets[:, None])[:, 0]
        found = found.index_put((torch.from_numpy(inputs.tokens),), logprobs)
    return found


def plain_logprobs(model: Any, prompted: list[PromptBlock], token_ids: np.ndarray[Any, Any]) -> Tensor:
    """Return the same, one sequence at a time, with positions computed by the model's own code."""
    parts = []
    for item in prompted:
        extra = {name: torch.tensor(array) for name, array in item.extra.items() if name != "position_ids"}
        if "video_grid_thw" in extra and model.config.model_type == "qwen2_5_vl":
            extra["second_per_grid_ts"] = torch.tensor([1.0])
        for start, stop in item.spans:
            ids = torch.from_numpy(np.concatenate([item.prompt_ids, token_ids[start:stop]]).astype(np.int64))[None]
            kinds = sum((ids == token) * kind for kind, token in enumerate(placeholders(model.config).values(), 1))
            model.base_model.rope_deltas = None
            logits = model(ids, mm_token_type_ids=kinds, **extra).logits[0, len(item.prompt_ids) - 1 : -1]
            parts.append(logits.log_softmax(-1).gather(-1, ids[0, len(item.prompt_ids) :, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_policy_logprobs_equal_those_of_the_rollout(tmp_path: Path, family: str) -> None:
    sampled = sample(tmp_path, family)
    prompted, token_ids = sampled.prompted(), sampled.token_ids
    with torch.no_grad():
        plain = plain_logprobs(sampled.model, prompted, token_ids)
        torch.testing.assert_close(sampled.logprobs, plain, rtol=0, atol=1e-5)
        assert attention_plan(sampled.model).layout == "forest"
        for batch in (
            pack_sequences(prompted, token_ids, 10_000),
            pack_sequences(prompted, token_ids, 70),
            pack_sequences(prompted, token_ids, 1000, share=False),
            pack_sequences(prompted, token_ids, 300, layout="rows"),
        ):
            torch.testing.assert_close(packed_logprobs(sampled.model, batch), plain, rtol=0, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_image_gradients_equal_those_of_single_sequences(tmp_path: Path, family: str, tied: bool) -> None:
    # Weights of the usual size: wider ones make the gradients themselves more sensitive to rounding than 2e-6.
    sampled = sample(tmp_path, family, tied=tied, initializer_range=0.1)
    model, prompted, token_ids = sampled.model, sampled.prompted(), sampled.token_ids
    weights = torch.from_numpy(np.random.default_rng(0).standard_normal(len(token_ids))).float()
    names, parameters = zip(*model.named_parameters(), strict=True)

    def gradients(logprobs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((logprobs * weights).sum(), parameters)

    alone = gradients(plain_logprobs(model, prompted, token_ids))
    packed = gradients(packed_logprobs(model, pack_sequences(prompted, token_ids, 10_000)))
    for name, found, expected in zip(names, packed, alone, strict=True):
        assert torch.linalg.vector_norm(found - expected) <= 2e-6 * torch.linalg.vector_norm(expected), name


@pytest.mark.parametrize("family", FAMILIES)
def test_changed_image_leaves_other_prompts_bitwise_unchanged(tmp_path: Path, family: str) -> None:
    sampled = sample(tmp_path, family)
    prompted, token_ids = sampled.prompted(), sampled.token_ids
    with torch.no_grad():
        before = packed_logprobs(sampled.model, pack_sequences(prompted, token_ids, 10_000))
        changed = {**prompted[2].extra, "pixel_values": prompted[2].extra["pixel_values"][:, ::-1].copy()}
        prompted[2] = dataclasses.replace(prompted[2], extra=changed)
        after = packed_logprobs(sampled.model, pack_sequences(prompted, token_ids, 10_000))
    own = torch.zeros(len(token_ids), dtype=torch.bool)
    own[prompted[2].spans[0][0] : prompted[2].spans[-1][1]] = True
    assert torch.equal(after[~own], before[~own])
    assert (after[own] != before[own]).all()


def test_images_of_a_group_are_encoded_once_within_the_budget(tmp_path: Path) -> None:
    sampled = sample(tmp_path, "qwen2_5_vl")
    prompted, token_ids = sampled.prompted(), sampled.token_ids
    once = sum(len(item.extra["pixel_values"]) for item in prompted if item.extra)

    def computed(batch: PackedBatch) -> int:
        inputs = [to_tensors(batch, microbatch) for microbatch in batch.plan]
        return sum(len(part.extra["pixel_values"]) for part in inputs if part.extra)

    assert computed(pack_sequences(prompted, token_ids, 200)) == once
    assert computed(pack_sequences(prompted, token_ids, 200, share=False)) == 3 * once
    narrow = pack_sequences(prompted, token_ids, max(len(item.prompt_ids) for item in prompted) + 8)
    assert once < computed(narrow) < 3 * once


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_prompts_decode_as_single_ones(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    encoder = make_encoder(write_folder(tmp_path, family, weights=False), model)
    prompts = {
        "a": ask("<image>", image(40, 12)),
        "b": ask("abc"),
        "c": ask("b<image><image>", image(8, 8), image(9, 30)),
    }
    with torch.no_grad():
        together = generate(model, encoder, prompts, max_tokens=6, temperature=0.0)
        for lease, prompt in prompts.items():
            alone = generate(model, encoder, {lease: prompt}, max_tokens=6, temperature=0.0)
            ours, theirs = (found[lease].completions[0] for found in (together, alone))
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_generate(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    encoder = make_encoder(write_folder(tmp_path, family, weights=False), model)
    video = Media(kind="video", uri=write_video(tmp_path / "video", 24, 16, 12), fps=2.0)
    prompt = ask("<image>a<video>", image(40, 12), video)
    ids, tensors = encoder.encode(prompt)
    ours = generate(model, encoder, {"g": prompt}, count=1, max_tokens=8, temperature=0.0)["g"].completions[0]
    token_ids = torch.tensor([ids])
    kinds = sum((token_ids == token) * kind for kind, token in enumerate(placeholders(model.config).values(), 1))
    arguments = {name: torch.from_numpy(array) for name, array in tensors.items() if name != "position_ids"}
    if family == "qwen2_5_vl":
        arguments["second_per_grid_ts"] = torch.tensor([1.0])
    never = [[token] for token in placeholders(model.config).values()]
    theirs = model.generate(
        token_ids, mm_token_type_ids=kinds, max_new_tokens=8, do_sample=False, bad_words_ids=never, **arguments
    )
    assert ours.token_ids.tolist() == theirs[0, len(ids) :].tolist()
