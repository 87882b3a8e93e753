"""Images on which the forward pass of a real vision model fails: the policy names their groups before the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vision import VOCABULARY, ask, generate, image, make_encoder, make_model, write_folder

from starling.common.wire.messages import Sampling, ScoredTrajectory, TensorMeta, TrainGroup
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import groups_from_wire
from starling.policy.train.errors import RejectedGroupsError
from starling.policy.train.learner import Learner
from starling.rollout.engine.base import GroupRequest, PartialCompletion, RequestError
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.multimodal.prompts import PromptEncoder
from starling.rollout.shell.results import generated_message

torch.set_num_threads(1)

IMAGE, VIDEO = VOCABULARY["<|image_pad|>"], VOCABULARY["<|video_pad|>"]
Arrays = list[tuple[str, np.ndarray[Any, Any]]]


def changed(name: str, change: Callable[[np.ndarray[Any, Any]], Any]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: [(n, np.ascontiguousarray(change(a)) if n == name else a) for n, a in arrays]


def with_token(index: int, token: int) -> Callable[[Arrays], Arrays]:
    def change(arrays: Arrays) -> Arrays:
        name, array = arrays[index]
        return [*arrays[:index], (name, np.array([token, *array[1:]], np.int32)), *arrays[index + 1 :]]

    return change


def _no_image(arrays: Arrays) -> Arrays:
    return changed("pixel_values", lambda a: a[:0])(changed("image_grid_thw", lambda a: a[:0])(arrays))


LIES: dict[str, tuple[str, Callable[[Arrays], Arrays], str]] = {
    "wide": ("shown", changed("pixel_values", lambda a: np.pad(a, ((0, 0), (0, 1)))), "97 values in a patch"),
    "no values": ("shown", changed("pixel_values", lambda a: a[:, :0]), "0 values in a patch"),
    "column": ("shown", changed("image_grid_thw", lambda a: [[a.prod(), 1, 1]]), "no multiple of 2"),
    "negative": ("shown", changed("image_grid_thw", lambda a: a * [1, -1, -1]), "three numbers from 1"),
    "overflow": (
        "shown",
        changed("image_grid_thw", lambda a: [*a.tolist(), [2**32, 2**32, 2]]),
        "three numbers from 1",
    ),
    "no image": ("shown", _no_image, "three numbers from 1"),
    "NaN": ("shown", changed("pixel_values", lambda a: a * np.float32("nan")), "not finite"),
    "large": ("shown", changed("pixel_values", lambda a: a * np.float32(1e25)), "not finite, or beyond"),
    "far": ("shown", changed("position_ids", lambda a: a + 512), "and the model has 512"),
    "sampled": ("shown", with_token(1, IMAGE), "a placeholder token of images or videos in a completion"),
    "sampled after text": ("text", with_token(1, VIDEO), "a placeholder token of images or videos in a completion"),
    "in a prompt of text": ("text", with_token(0, IMAGE), "1 placeholder tokens 6 where image_grid_thw describes 0"),
}


@pytest.mark.parametrize("family", ["qwen2_vl", pytest.param("qwen3_vl", marks=pytest.mark.campaign)])
def test_groups_that_a_vision_model_cannot_read_are_named_and_the_others_trained(tmp_path: Path, family: str) -> None:
    learner = Learner(lambda: make_model(family), PolicySettings())
    encoder = make_encoder(write_folder(tmp_path, family, weights=False), learner.model)
    with torch.no_grad():
        sampled = generate(learner.model, encoder, {"shown": ask("<image>a", image(40, 12)), "text": ask("ab")})

    def read(lie: str = "") -> Any:
        groups, frames = [], []
        for lease, result in sampled.items():
            message, buffers = generated_message(result, str)
            arrays: Arrays = [
                (m.name, np.frombuffer(b, m.dtype).reshape(m.shape))
                for m, b in zip(message.tensors, buffers, strict=True)
            ]
            if lie and LIES[lie][0] == lease:
                arrays = LIES[lie][1](arrays)
            trajectories = tuple(
                ScoredTrajectory(num_tokens=meta.num_tokens, oldest_version=0, reward=float(index))
                for index, meta in enumerate(message.trajectories)
            )
            metas = tuple(TensorMeta(dtype=a.dtype.name, shape=a.shape, nbytes=a.nbytes, name=n) for n, a in arrays)
            groups.append(TrainGroup(prompt_id=lease, trajectories=trajectories, tensors=metas))
            frames += [array.tobytes() for _, array in arrays]
        return groups_from_wire(groups, frames, learner.limits)

    for lie, (liar, _, complaint) in LIES.items():
        with pytest.raises(RejectedGroupsError, match=complaint) as refusal:
            read(lie)
        assert refusal.value.prompts == (liar,), lie
    assert np.isfinite(learner.reinforce(read(), step=1, num_steps=1)["grad_norm"])


def test_engine_refuses_partial_completions_with_placeholders() -> None:
    engine = TransformersEngine(make_model("qwen2_vl"), eos_token_ids=())
    ids = np.array([IMAGE], np.int32)
    partial = PartialCompletion(ids, np.zeros(1, np.float32), np.zeros(1, np.int32))
    request = GroupRequest("g", [8, 9], 1, Sampling(max_tokens=4), partial=(partial,))
    with pytest.raises(RequestError, match="partial completion 0 has a placeholder token"):
        engine.add(request)


def test_images_that_the_model_cannot_take_fail_when_they_are_encoded(tmp_path: Path) -> None:
    """A processor with other patches than the model's."""
    encoder: PromptEncoder = make_encoder(write_folder(tmp_path, "qwen2_vl", weights=False), make_model("qwen2_vl"))
    encoder._vision._images.patch_size = 6  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="216 values in a patch, and the model takes 96; check preprocessor_config"):
        encoder.encode(ask("<image>", image(48, 48)))
