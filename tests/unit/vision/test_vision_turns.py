"""Environment turns after a prompt with images have the same positions in rollout and policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vision import FAMILIES, ask, image, make_encoder, make_model, make_tokenizer, write_folder

from starling.common.wire.messages import Sampling, ScoredTrajectory, TrainGroup
from starling.policy.train.data.groups import groups_from_wire
from starling.policy.train.data.packing import PromptBlock, pack_sequences, to_tensors
from starling.policy.train.model.lm_head import trained_logits
from starling.rollout.engine.base import GroupRequest, GroupResult
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.env.base import EpisodeOutcome
from starling.rollout.env.episodes.episode import EpisodeError, EpisodeTask, TokenEpisode
from starling.rollout.env.episodes.trajectory import group_trajectories
from starling.rollout.shell.results import played_message

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_after_an_image_are_equal_in_rollout_and_policy(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    encoder = make_encoder(write_folder(tmp_path, family, weights=False), model)
    engine = TransformersEngine(model, eos_token_ids=(), max_rows=64, version=0)
    prompt = ask("<image>a", image(40, 12))
    ids, tensors = encoder.encode(prompt)

    async def through(request: GroupRequest, enough: Callable[[], bool]) -> GroupResult:
        engine.add(request)
        while True:
            for result in engine.step():
                assert isinstance(result, GroupResult)
                return result

    task = EpisodeTask(
        lease="t0",
        prompt=prompt,
        prompt_ids=ids,
        sampling=Sampling(max_tokens=20, seed=4),
        max_turns=4,
        turn_max_tokens=0,
        max_model_len=300,
        tensors=tensors,
    )
    episodes = [TokenEpisode(task, index, make_tokenizer(), through) for index in range(2)]

    async def play(one: TokenEpisode) -> None:
        with pytest.raises(EpisodeError, match="cannot add to a prompt with images before"):
            one.say({"role": "u", "content": "b"})
        await one.reply(max_tokens=3)
        one.say({"role": "u", "content": "bcd" * (one.index + 1)})
        await one.reply(max_tokens=4)

    with torch.no_grad():
        for one in episodes:
            asyncio.run(play(one))
    ended = [one.end(EpisodeOutcome()) for one in episodes]
    played = group_trajectories("t0", ids, ended, temperature=1.0, min_version=0, tensors=tensors)
    message, buffers = played_message(played, str)
    trajectories = tuple(
        ScoredTrajectory(num_tokens=meta.num_tokens, oldest_version=0, reward=0.0) for meta in message.trajectories
    )
    train = TrainGroup(prompt_id="t0", trajectories=trajectories, tensors=message.tensors)
    (group,) = groups_from_wire([train], buffers)
    assert group.num_sampled == (7, 7)
    assert group.lengths[1] > group.lengths[0] > 7
    first = group.lengths[0]
    prompted = PromptBlock(group.prompt_ids, ((0, first), (first, sum(group.lengths))), group.extra)
    batch = pack_sequences([prompted], group.completion_ids, 1000)
    with torch.no_grad():
        for microbatch in batch.plan:
            inputs = to_tensors(batch, microbatch, trained=group.sampled)
            found = trained_logits(model, inputs).log_softmax(-1).gather(-1, inputs.targets[:, None])[:, 0]
            expected = group.logprobs[group.sampled][inputs.tokens]
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
