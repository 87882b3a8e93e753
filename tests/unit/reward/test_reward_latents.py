"""Latents of a run's groups in the core: what is refused, which sample has which, and what waits for memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.wire.messages import CompletionText, Prompt, ScoreGroup, Status, TensorMeta
from starling.reward.core.groups import GroupScores, SendScores, SubmitTask
from starling.reward.core.latents import LatentsError, latents_form
from starling.reward.core.media import MediaForm, MediaRow, MediaTensor
from starling.reward.core.rewards import WeightedScorer
from starling.reward.core.samples import Score
from starling.reward.core.waiting import WaitingGroup, WaitingGroups

SHAPE = (2, 4, 3, 5)
SIZE_BYTES = math.prod(SHAPE) * 4
OK = (Status.OK, Status.OK)


def group(*tensors: TensorMeta, lease: str = "score:1:0", statuses: tuple[Status, ...] = OK) -> ScoreGroup:
    completions = tuple(CompletionText(text="", status=status, num_tokens=3) for status in statuses)
    return ScoreGroup(lease=lease, prompt=Prompt(id="train/0/0", text="p"), completions=completions, tensors=tensors)


def meta(**changes: Any) -> TensorMeta:
    fields = {"dtype": "float32", "shape": SHAPE, "nbytes": SIZE_BYTES, "name": "latents"}
    return TensorMeta(**(fields | changes))


def test_latents_of_an_image_get_one_frame_and_those_of_a_video_keep_theirs() -> None:
    assert latents_form(group(meta()), (bytes(SIZE_BYTES),)) == MediaForm("latents", "float32", (4, 1, 3, 5))
    video = meta(shape=(2, 4, 3, 5, 1), dtype="float16", nbytes=SIZE_BYTES // 2)
    assert latents_form(group(video), (bytes(SIZE_BYTES // 2),)) == MediaForm("latents", "float16", (4, 3, 5, 1))
    assert latents_form(group(), ()) is None


@pytest.mark.parametrize(
    ("tensors", "sizes", "problem"),
    [
        ((meta(),), (), "0 buffers for 1 tensors"),
        ((), (4,), "1 buffers for 0 tensors"),
        ((meta(name="states"),), (SIZE_BYTES,), "the tensors 'states', and only 'latents' are scored"),
        ((meta(), meta()), (SIZE_BYTES, SIZE_BYTES), "the tensors 'latents', 'latents'"),
        ((meta(dtype="bfloat16"),), (SIZE_BYTES,), "dtype 'bfloat16', and only float32 or float16 is scored"),
        ((meta(dtype="float64" * 99),), (SIZE_BYTES,), "dtype 'float64float64float64float64float64float'"),
        ((meta(shape=(2, 60), nbytes=SIZE_BYTES),), (SIZE_BYTES,), r"shape \[2, 60\], and should have"),
        ((meta(shape=(), nbytes=4),), (4,), r"shape \[\], and should have"),
        ((meta(shape=(2, 4, 0, 5), nbytes=0),), (0,), r"shape \[2, 4, 0, 5\].* without a 0"),
        ((meta(shape=(-2, -4, 3, 5)),), (SIZE_BYTES,), r"shape \[-2, -4, 3, 5\]"),
        ((meta(shape=(3, 4, 3, 5), nbytes=720),), (720,), "has 2 completions and latents of 3"),
        ((meta(),), (SIZE_BYTES - 1,), r"came in 479 bytes, and float32\[2, 4, 3, 5\] takes 480"),
        ((meta(nbytes=4),), (SIZE_BYTES,), "takes 480"),
        ((meta(shape=(2, 1 << 60, 1 << 60, 1 << 60)),), (SIZE_BYTES,), "came in 480 bytes"),
    ],
)
def test_wrong_latents_are_refused_with_a_sentence(
    tensors: tuple[TensorMeta, ...], sizes: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(LatentsError, match=problem) as refused:
        latents_form(group(*tensors), tuple(bytes(size) for size in sizes))
    text = str(refused.value)
    assert text.startswith("The ")
    assert text.endswith(".")
    assert len(text) < 400


@given(
    shape=st.lists(st.integers(-2, 6), max_size=7),
    dtype=st.sampled_from(["float32", "float16", "int32", ""]),
    nbytes=st.integers(0, 400),
    num_bytes=st.integers(0, 400),
    name=st.sampled_from(["latents", ""]),
)
def test_what_is_accepted_fits_its_buffer_exactly(
    shape: list[int], dtype: str, nbytes: int, num_bytes: int, name: str
) -> None:
    tensor = TensorMeta(dtype=dtype, shape=tuple(shape), nbytes=nbytes, name=name)
    try:
        form = latents_form(group(tensor), (bytes(num_bytes),))
    except LatentsError:
        return
    assert form is not None
    assert 2 * form.size_bytes == num_bytes == nbytes


class Bytes:
    """Memory of latents as the core knows it."""

    size_bytes = SIZE_BYTES

    def read(self, offset: int, num_bytes: int) -> bytes:
        return bytes(num_bytes)


def test_each_sample_has_its_own_row_also_after_one_that_is_not_scored() -> None:
    machine = GroupScores((WeightedScorer("s", 1.0),), 2)
    message = group(meta(), statuses=(Status.ENV_ERROR, Status.OK))
    form = latents_form(message, (bytes(SIZE_BYTES),))
    assert form is not None
    latents = MediaTensor(form, 2, Bytes())
    (submit,) = machine.add(message, latents)
    assert isinstance(submit, SubmitTask)
    assert submit.task.media == (latents,)
    assert [(one.index, one.media) for one in submit.task.samples] == [(1, MediaRow(0, 1))]
    (answer,) = machine.record(Score("score:1:0", 1, 0, 2.0))
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (None, 2.0)


def test_group_that_cannot_be_scored_is_answered_without_a_reward() -> None:
    machine = GroupScores((WeightedScorer("s", 1.0),), 2)
    message = group(statuses=(Status.TRUNCATED, Status.INFRA_LOST))
    (answer,) = machine.fail(message, Status.REWARD_ERROR, "The reason.")
    assert isinstance(answer, SendScores)
    assert answer.message.rewards == (None, None)
    assert answer.message.statuses == (Status.REWARD_ERROR, Status.INFRA_LOST)
    assert answer.message.problems == ("The reason.",)
    assert (machine.working, machine.queued) == (frozenset(), ())


def waiting(lease: str, latents: int, pixels: int = 0, at: float = 0.0) -> WaitingGroup:
    form = MediaForm("latents", "float16", (4, 1, 1, 1))
    return WaitingGroup(group(lease=lease), form, bytes(latents), pixels, at)


def test_groups_wait_for_memory_in_their_order() -> None:
    groups = WaitingGroups(10.0)
    large, small = waiting("large", 40, 60), waiting("small", 8, at=1.0)
    groups.add(large)
    groups.add(small)
    assert groups.first_of(99) is None, "the small one does not overtake"
    assert groups.first_of(100) is large
    assert groups.take() is large
    assert groups.first_of(8) is small
    assert (len(groups), groups.next_deadline()) == (1, 11.0)


def test_group_waits_up_to_its_deadline_or_until_it_is_cancelled() -> None:
    groups = WaitingGroups(10.0)
    for number in range(4):
        groups.add(waiting(f"g{number}", 8, at=float(number)))
    groups.cancel(("g1", "none"))
    assert groups.expire(9.9) == []
    assert [one.message.lease for one in groups.expire(12.0)] == ["g0", "g2"]
    assert groups.next_deadline() == 13.0
    groups.cancel(("g3",))
    assert groups.next_deadline() is None
    assert groups.first_of(1 << 40) is None
