"""Decoding of groups from the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from starling.common.errors import ConfigError, WireError
from starling.common.wire.messages import ModelLimits, ScoredTrajectory, ScorerScores, TensorMeta, TrainGroup
from starling.policy.train.data.groups import ScoredGroup, groups_from_wire
from starling.policy.train.errors import RejectedGroupsError

ARRAYS = (
    np.array([1, 2, 3], dtype=np.int32),
    np.array([4, 5, 6, 7, 8], dtype=np.int32),
    np.array([-0.1, -0.2, -0.3, -0.4, -0.5], dtype=np.float32),
    np.array([0, 0, 1, 1, 1], dtype=np.int32),
)


def message(arrays: tuple[np.ndarray[Any, Any], ...] = ARRAYS, prompt_id: str = "train/0/0") -> TrainGroup:
    return TrainGroup(
        prompt_id=prompt_id,
        trajectories=(
            ScoredTrajectory(num_tokens=2, oldest_version=0, reward=1.0),
            ScoredTrajectory(num_tokens=3, oldest_version=1, reward=0.5),
        ),
        tensors=tuple(TensorMeta(dtype=a.dtype.name, shape=a.shape, nbytes=a.nbytes) for a in arrays),
    )


def buffers(arrays: tuple[np.ndarray[Any, Any], ...] = ARRAYS) -> list[memoryview]:
    return [memoryview(array.tobytes()) for array in arrays]


def test_groups_from_wire_keeps_order() -> None:
    other = tuple(array + 1 for array in ARRAYS)
    first, second = groups_from_wire([message(), message(other, "train/0/1")], buffers() + buffers(other))
    assert first.lengths == (2, 3)
    assert first.rewards == (1.0, 0.5)
    for found, expected in zip(
        (first.prompt_ids, first.completion_ids, first.logprobs, first.versions), ARRAYS, strict=True
    ):
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
    assert second.prompt_id == "train/0/1"
    assert second.completion_ids.tolist() == other[1].tolist()


def test_groups_from_wire_missing_or_surplus_buffers_are_refused() -> None:
    with pytest.raises(WireError, match="lacks a buffer"):
        groups_from_wire([message()], buffers()[:3])
    with pytest.raises(WireError, match="1 buffers too many"):
        groups_from_wire([message()], [*buffers(), memoryview(b"")])
    with pytest.raises(WireError, match="describes 3 tensors"):
        groups_from_wire([message(ARRAYS[:3])], buffers())


def test_groups_from_wire_wrong_buffer_is_refused() -> None:
    short = [*buffers()[:1], buffers()[1][:-4], *buffers()[2:]]
    with pytest.raises(WireError, match=r"int32\[5\] in a buffer of 16 bytes"):
        groups_from_wire([message()], short)
    double = (*ARRAYS[:2], ARRAYS[2].astype(np.float64), ARRAYS[3])
    with pytest.raises(WireError, match="expected one dimension of float32"):
        groups_from_wire([message(double)], buffers(double))


def test_group_inconsistent_lengths_are_refused() -> None:
    wrong = msgspec.structs.replace(message(), trajectories=message().trajectories[:1])
    with pytest.raises(WireError, match="each must have one entry per token"):
        groups_from_wire([wrong], buffers())


def test_group_without_prompt_or_reward_is_refused() -> None:
    prompt, ids, logprobs, versions = ARRAYS
    with pytest.raises(ConfigError, match="'p' has no tokens"):
        ScoredGroup(prompt[:0], ids, logprobs, versions, (2, 3), (1.0, 0.0), "p")
    with pytest.raises(ConfigError, match="2 completions but 1 rewards"):
        ScoredGroup(prompt, ids, logprobs, versions, (2, 3), (1.0,), "p")


def test_groups_from_wire_have_the_scores_of_each_scorer() -> None:
    scores = (
        ScorerScores(label="math", weight=1.0, values=(1.0, 0.0)),
        ScorerScores(label="code", weight=-0.5, values=(None, None)),
    )
    [group] = groups_from_wire([msgspec.structs.replace(message(), scores=scores)], buffers())
    assert group.scores == scores
    [without] = groups_from_wire([message()], buffers())
    assert without.scores == ()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"values": (1.0,)}, "'train/0/0' has 2 completions and 1 scores of 'math': give one score per completion"),
        ({"values": (1.0, float("nan"))}, "a score of 'math', or its weight, is nan"),
        ({"values": (float("-inf"), None)}, "a score of 'math', or its weight, is -inf"),
        ({"weight": float("inf")}, "a score of 'math', or its weight, is inf"),
    ],
)
def test_groups_with_invalid_scores_are_named_in_the_refusal(changes: dict[str, Any], complaint: str) -> None:
    scores = ScorerScores(**{"label": "math", "weight": 1.0, "values": (1.0, 0.0)} | changes)
    with pytest.raises(RejectedGroupsError, match=complaint) as raised:
        groups_from_wire([msgspec.structs.replace(message(), scores=(scores,))], buffers())
    assert raised.value.prompts == ("train/0/0",)


PIXELS = {
    "pixel_values": np.arange(12, dtype=np.float32).reshape(4, 3),
    "image_grid_thw": np.array([[1, 2, 2]], dtype=np.int64),
    "position_ids": np.array([[0, 1, 2]] * 3, dtype=np.int32),
}


def with_pixels(pixels: dict[str, np.ndarray[Any, Any]]) -> tuple[TrainGroup, list[memoryview]]:
    described = tuple(
        TensorMeta(dtype=a.dtype.name, shape=a.shape, nbytes=a.nbytes, name=name) for name, a in pixels.items()
    )
    group = message()
    frames = buffers() + [memoryview(array.tobytes()) for array in pixels.values()]
    return msgspec.structs.replace(group, tensors=group.tensors + described), frames


def test_groups_from_wire_decodes_image_tensors() -> None:
    shown, frames = with_pixels(PIXELS)
    plain, first, last = groups_from_wire([message(), shown, message()], [*buffers(), *frames, *buffers()])
    assert plain.extra == last.extra == {}
    assert {name: array.tolist() for name, array in first.extra.items()} == {
        name: array.tolist() for name, array in PIXELS.items()
    }
    assert first.extra["pixel_values"].dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"depth": PIXELS["pixel_values"]}, "has a tensor 'depth' and can only have pixel_values, "),
        ({"pixel_values": PIXELS["pixel_values"][:3]}, "3 rows of pixel_values came, and image_grid_thw describes 4"),
        ({"video_grid_thw": PIXELS["image_grid_thw"]}, "one of pixel_values_videos and video_grid_thw came without"),
        ({"position_ids": PIXELS["position_ids"][:, :2]}, r"position_ids are \[3, 2\] instead of \[3, 3\]"),
        ({"pixel_values": PIXELS["pixel_values"].ravel()}, "expected 2 dimensions of float32"),
        ({"image_grid_thw": PIXELS["image_grid_thw"][:, :2]}, r"image_grid_thw \[1, 2\] has not three numbers"),
    ],
)
def test_group_invalid_images_are_refused(changes: dict[str, np.ndarray[Any, Any]], complaint: str) -> None:
    shown, frames = with_pixels({**PIXELS, **changes})
    with pytest.raises(WireError, match=complaint):
        groups_from_wire([shown], frames)


def test_group_images_without_positions_are_refused() -> None:
    shown, frames = with_pixels({name: array for name, array in PIXELS.items() if name != "position_ids"})
    with pytest.raises(WireError, match=r"position_ids are none instead of \[3, 3\]"):
        groups_from_wire([shown], frames)


def test_groups_that_cannot_be_trained_are_named_in_the_refusal() -> None:
    """The controller takes these groups out of the step; the others are no reason to refuse it."""
    beyond = (ARRAYS[0], np.full_like(ARRAYS[1], 77), *ARRAYS[2:])
    double = (*ARRAYS[:2], ARRAYS[2].astype(np.float64), ARRAYS[3])
    sent = [message(), message(beyond, "train/0/1"), message(double, "train/0/2")]
    frames = buffers() + buffers(beyond) + buffers(double)
    with pytest.raises(RejectedGroupsError, match="token ids from 77 to 77, and the model has 77") as refusal:
        groups_from_wire(sent, frames, ModelLimits(vocabulary_size=77))
    assert refusal.value.prompts == ("train/0/1", "train/0/2")
    assert len(groups_from_wire(sent[:2], frames[:8], ModelLimits(vocabulary_size=78))) == 2


def test_group_with_a_sequence_beyond_the_context_is_named_in_the_refusal() -> None:
    """Three tokens of the prompt and three of the second completion."""
    sent, frames = [message(), message(prompt_id="train/0/1")], [*buffers(), *buffers()]
    short = (ARRAYS[0][:2], *ARRAYS[1:])
    sent[0], frames[0] = message(short), buffers(short)[0]
    with pytest.raises(RejectedGroupsError, match=r"a sequence of 6 tokens, 3 of .* attend to 5") as refusal:
        groups_from_wire(sent, frames, ModelLimits(longest=5))
    assert refusal.value.prompts == ("train/0/1",)
    assert len(groups_from_wire(sent, frames, ModelLimits(longest=6))) == 2


def test_group_with_images_is_refused_for_a_model_that_reads_text() -> None:
    shown, frames = with_pixels(PIXELS)
    with pytest.raises(RejectedGroupsError, match="has images or videos, and the model reads only text") as refusal:
        groups_from_wire([message(prompt_id="text"), shown], [*buffers(), *frames], ModelLimits())
    assert refusal.value.prompts == (shown.prompt_id,)


def test_completion_without_sampled_tokens_may_exceed_the_context() -> None:
    """It is scored and not trained."""
    mask = np.array([1, 1, 0, 0, 0], np.uint8)
    described = TensorMeta(dtype="uint8", shape=(5,), nbytes=5, name="loss_mask")
    masked = msgspec.structs.replace(message(), tensors=(*message().tensors, described))
    frames = [*buffers(), memoryview(mask.tobytes())]
    assert len(groups_from_wire([masked], frames, ModelLimits(longest=5))) == 1
    with pytest.raises(RejectedGroupsError, match="a sequence of 5 tokens"):
        groups_from_wire([masked], frames, ModelLimits(longest=4))


def test_groups_of_a_step_without_a_sampled_token_are_named_in_the_refusal() -> None:
    """Such a step cannot be trained, and its groups are none the better in another one."""
    empty = (ARRAYS[0], *(array[:0] for array in ARRAYS[1:]))
    none = tuple(ScoredTrajectory(num_tokens=0, oldest_version=0, reward=reward) for reward in (1.0, 0.5))
    sent = [msgspec.structs.replace(message(empty, name), trajectories=none) for name in ("train/0/1", "train/0/2")]
    with pytest.raises(RejectedGroupsError, match="the 2 groups of the step have no sampled token") as refusal:
        groups_from_wire(sent, [*buffers(empty), *buffers(empty)])
    assert refusal.value.prompts == ("train/0/1", "train/0/2")
    assert len(groups_from_wire([message(), sent[0]], [*buffers(), *buffers(empty)])) == 2
