"""Results that a controller refuses to store: whatever a replica sends, what the journal holds can be trained."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from generated_results import KINDS, Result, reason, valid
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from transcript import Script, Stream

from starling.common.wire import codec
from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.controller.core.groups.group import GroupState
from starling.controller.core.groups.validation.validation import (
    InvalidResultError,
    UnusableResultError,
    check_group_contents,
    check_group_forms,
    check_trajectories,
    teacher_arrays,
)
from starling.controller.core.machine import Controller
from starling.controller.core.records import (
    CompletionsStored,
    JournalEntry,
    PartialCompletionsStored,
    RewardsStored,
    TeacherLogprobsStored,
)
from starling.policy.train.data.groups import groups_from_wire
from starling.sim.replicas.weights import encoded_layout, encoded_offer, offer_of


def _float64_without_bytes(result: Result) -> None:
    result.put(2, np.zeros(0, np.float64))
    result.tensors[2] = replace(result.tensors[2], shape=(4,))


def _described(index: int, **fields: Any) -> Callable[[Result], None]:
    def change(result: Result) -> None:
        result.tensors[index] = replace(result.tensors[index], **fields)

    return change


def _array(index: int, array: np.ndarray[Any, Any], name: str = "") -> Callable[[Result], None]:
    return lambda result: result.put(index, array, name)


def _completion(**fields: Any) -> Callable[[Result], None]:
    return lambda result: result.change(1, **fields)


def _drop_buffer(result: Result) -> None:
    del result.buffers[3]


def _masked_without_a_mask(result: Result) -> None:
    result.change(0, num_masked=1)


def _twice(result: Result) -> None:
    result.put(4, np.ones(4, np.uint8), "loss_mask")
    result.put(5, np.ones(4, np.uint8), "loss_mask")


def _kept(counts: list[int], ids: list[int], *mask: int) -> Callable[[Result], None]:
    """Say which tokens were kept for the four tokens, all of id 0."""

    def change(result: Result) -> None:
        result.put(4, np.array(counts, np.int32), "kept_counts")
        result.put(5, np.array(ids, np.int32), "kept_ids")
        if mask:
            result.put(6, np.array(mask, np.uint8), "loss_mask")
            result.change(0, num_masked=2 - sum(mask[:2]))

    return change


def _at_temperature(value: float) -> Callable[[Result], None]:
    def change(result: Result) -> None:
        result.temperature = value

    return change


MALFORMED: dict[str, tuple[Callable[[Result], None], str]] = {
    "float64 of 0 bytes": (_float64_without_bytes, "tensor of log-probabilities is float64"),
    "too few elements": (_array(1, np.zeros(3, np.int32)), "4 tokens, and 3 token ids"),
    "other type": (_array(3, np.zeros(4, np.float32)), "tensor of versions is float32"),
    "two dimensions": (_array(1, np.zeros((2, 2), np.int32)), r"tensor of token ids is int32\[2, 2\]"),
    "negative shape": (_described(1, shape=(-4,)), r"tensor of token ids is int32\[-4\]"),
    "no shape": (_described(1, shape=()), r"tensor of token ids is int32\[\]"),
    "many dimensions": (_described(1, shape=(2**40,) * 1000), "tensor of token ids is int32"),
    "size other than its buffer": (_described(1, nbytes=400), "tensor of token ids is int32"),
    "missing buffer": (_drop_buffer, "4 tensors came in 3 buffers"),
    "empty prompt": (_array(0, np.zeros(0, np.int32)), "its prompt has no tokens"),
    "negative prompt token": (_array(0, np.array([1, -1], np.int32)), "a negative token id"),
    "negative token": (_array(1, np.array([1, 2, -3, 4], np.int32)), "a negative token id"),
    "versions unlike the completions'": (_array(3, np.array([0, 0, 1, 0], np.int32)), "the versions of its tokens"),
    "negative number of tokens": (_completion(num_tokens=-2), "completion 1 has -2 tokens"),
    "more tokens than tensors": (_completion(num_tokens=3), "5 tokens, and 4 token ids"),
    "more masked than tokens": (_completion(num_masked=3), "2 tokens, 3 of them masked"),
    "no mask": (_masked_without_a_mask, "masked, and no mask came"),
    "short mask": (_array(4, np.ones(3, np.uint8), "loss_mask"), "a mask of 3 entries"),
    "mask of 2": (_array(4, np.full(4, 2, np.uint8), "loss_mask"), "0 or 1"),
    "mask of other tokens": (_array(4, np.array([1, 1, 0, 1], np.uint8), "loss_mask"), "0 masked tokens, its mask 1"),
    "unknown tensor": (_array(4, np.ones(4, np.uint8), "gradient"), "'gradient' came"),
    "one tensor twice": (_twice, "'loss_mask' came, or came twice"),
    "kept tokens without counts": (_array(4, np.zeros(4, np.int32), "kept_ids"), "without the other"),
    "counts without kept tokens": (_array(4, np.zeros(4, np.int32), "kept_counts"), "without the other"),
    "counts of fewer tokens": (_kept([1, 1, 1], [0, 0, 0]), "3 sets of kept tokens came with 4 tokens"),
    "counts of more kept tokens": (_kept([1, 1, 1, 2], [0, 0, 0, 0]), "do not add up"),
    "negative count": (_kept([2, -1, 1, 1], [0, 1, 0]), "do not add up"),
    "counts beyond 32 bits": (_kept([2**31 - 1] * 2 + [1, 1], [0, 0]), "do not add up"),
    "kept tokens in disorder": (_kept([2, 1, 1, 1], [5, 0, 0, 0, 0]), "ascending order"),
    "kept token twice": (_kept([2, 1, 1, 1], [0, 0, 0, 0, 0]), "ascending order"),
    "negative kept token": (_kept([2, 1, 1, 1], [-1, 0, 0, 0, 0]), "ascending order"),
    "token that was not kept": (_kept([1, 2, 1, 1], [0, 1, 2, 0, 0]), "token 1 is not among those that were kept"),
    "kept tokens of an environment": (_kept([1, 1, 1, 1], [0, 0, 0, 0], 1, 0, 1, 1), "a token that was not sampled"),
    "endless truncation": (_completion(truncation_nats=float("inf")), "have inf nats"),
    "truncation NaN": (_completion(truncation_nats=float("nan")), "have nan nats"),
    "unpublished version": (_completion(newest_version=7), "versions 0 to 7, and the newest that is published is 0"),
    "versions in reverse": (_completion(oldest_version=0, newest_version=-1), "versions 0 to -1"),
    "negative turns": (_completion(num_turns=-1), "in -1 turns"),
    "another temperature": (_at_temperature(0.5), "at temperature 0.5 instead of 1.0"),
    "endless temperature": (_at_temperature(float("inf")), "at temperature inf"),
}
UNUSABLE: dict[str, tuple[Callable[[Result], None], str]] = {
    "log-probability NaN": (_array(2, np.array([0, -1, np.nan, 0], np.float32)), "a log-probability is not finite"),
    "log-probability -inf": (_array(2, np.array([0, -np.inf, 0, 0], np.float32)), "a log-probability is not finite"),
    "log-probability beyond all": (_array(2, np.array([0, -3.4e38, 0, 0], np.float32)), "-1e.06 to 0 are usable"),
    "log-probability far above 0": (_array(2, np.array([0, 3.4e38, 0, 0], np.float32)), "-1e.06 to 0 are usable"),
    "reward NaN": (_completion(reward=float("nan")), "a reward of nan"),
    "reward without end": (_completion(reward=float("inf")), "a reward of inf"),
    "reward too large": (_completion(reward=1e300), "a reward of 1e"),
    "metric NaN": (_completion(metrics={"won": float("nan")}), "nan as its metric won"),
    "metric whose sum overflows": (_completion(metrics={"won": 1.7e308}), r"1.7e\+308 as its metric won"),
    "metric names": (_completion(metrics={str(n): 0.0 for n in range(2000)}), "2000 metrics"),
    "long metric name": (_completion(metrics={"x" * 300: 0.0}), "a name of many characters"),
    "texts": (_completion(text="é" * (9 << 20)), "bytes of text"),
}


@pytest.mark.parametrize(
    ("versions", "mask", "named", "fits"),
    [
        ([3, 3, 4, 4], None, ((3, 3), (4, 4)), True),
        ([3, 4, 4, 4], None, ((3, 4), (4, 4)), True),
        ([4, 3, 4, 4], None, ((3, 4), (4, 4)), True),
        ([3, 3, 4, 4], None, ((3, 3), (3, 4)), False),
        ([3, 4, 4, 4], None, ((4, 4), (4, 4)), False),
        ([3, 4, 4, 4], None, ((3, 3), (4, 4)), False),
        ([3, 4, 4, 4], [1, 0, 1, 1], ((3, 3), (4, 4)), True),
        ([3, 5, 4, 4], [1, 0, 1, 1], ((3, 3), (4, 4)), False),
        ([2, 3, 4, 4], [0, 1, 1, 1], ((3, 3), (4, 4)), False),
        ([3, 3, 4, 4], [0, 0, 1, 1], ((0, 4), (4, 4)), True),
        ([5, 5, 4, 4], [0, 0, 1, 1], ((0, 4), (4, 4)), False),
        ([3, 3, -1, 3], None, ((3, 3), (3, 3)), False),
    ],
)
def test_versions_of_tokens_are_those_that_its_completions_name(
    versions: list[int], mask: list[int] | None, named: tuple[tuple[int, int], ...], fits: bool
) -> None:
    """Masked tokens need not be of a version that their own completion names, but of one of the group."""
    result = valid()
    result.put(3, np.array(versions, np.int32))
    if mask is not None:
        result.put(4, np.array(mask, np.uint8), "loss_mask")
    for index, (oldest, newest) in enumerate(named):
        num_masked = 2 - sum(mask[2 * index : 2 * index + 2]) if mask is not None else 0
        result.change(index, oldest_version=oldest, newest_version=newest, num_masked=num_masked)
    contents = (result.trajectories, result.tensors, result.buffers, None)
    if fits:
        check_group_contents(*contents)
    else:
        with pytest.raises(InvalidResultError, match="the versions of its tokens"):
            check_group_contents(*contents)


@pytest.mark.parametrize("first", [1 << 62, -(1 << 62), 5, -1, -2, -5])
def test_counts_that_cannot_be_are_an_invalid_result(first: int) -> None:
    """Their sum is right, and the tensors are looked at before each of them."""
    result = valid()
    result.put(3, np.array([0, 1, 0, 1], np.int32))
    for index, num_tokens in enumerate((first, 4 - first)):
        result.change(index, num_tokens=num_tokens, oldest_version=0, newest_version=3)
    with pytest.raises(InvalidResultError):
        check_group_contents(result.trajectories, result.tensors, result.buffers, None)


@pytest.mark.parametrize("case", [*MALFORMED, *UNUSABLE])
def test_invalid_completions_are_a_failed_try_and_never_stored(case: str) -> None:
    change, complaint = {**MALFORMED, **UNUSABLE}[case]
    script = Script()
    script.start_run()
    result = valid()
    change(result)
    result.send(script)
    group = script.state.buffer.get(0)
    assert group is not None
    assert (group.tries, group.trajectories) == (1, ())
    assert re.search(complaint, reason(script)), reason(script)
    assert not any(isinstance(write.record, CompletionsStored) for write in script.journal)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [10, 10_000])
def test_one_log_probability_that_is_not_finite_is_found(bad: float, length: int) -> None:
    script = Script(sampling=wire.Sampling(max_tokens=length))
    script.start_run()
    result = valid()
    for index in (1, 2, 3):
        result.put(index, np.zeros(2 * length, KINDS[index][0]))
    for index in (0, 1):
        result.change(index, num_tokens=length)
    logprobs = np.full(2 * length, -1e3, np.float32)
    logprobs[length + 3] = bad
    result.put(2, logprobs)
    result.send(script)
    assert "a log-probability is not finite" in reason(script)


@pytest.mark.parametrize("length", [10, 10_000])
def test_log_probability_of_hardly_any_probability_is_accepted(length: int) -> None:
    script = Script(sampling=wire.Sampling(max_tokens=length))
    script.start_run()
    result = valid()
    for index in (1, 2, 3):
        result.put(index, np.zeros(2 * length, KINDS[index][0]))
    for index in (0, 1):
        result.change(index, num_tokens=length)
    result.put(2, np.full(2 * length, -1e6, np.float32))
    result.send(script)
    assert any(isinstance(write.record, CompletionsStored) for write in script.journal)


def test_completion_with_more_tokens_than_were_allowed_is_a_failed_try() -> None:
    """The model may not attend to so many, and the step that holds them is frozen before a policy sees them."""
    script = Script(sampling=wire.Sampling(max_tokens=3))
    script.start_run()
    result = valid()
    for index in (1, 2, 3):
        result.put(index, np.zeros(6, KINDS[index][0]))
    result.change(0, num_tokens=4)
    result.send(script)
    assert "completion 0 has 4 sampled tokens, and 3 were allowed" in reason(script)
    assert not any(isinstance(write.record, CompletionsStored) for write in script.journal)


def test_masked_and_resumed_tokens_may_exceed_the_limit() -> None:
    """An environment's tokens are not sampled, and a limit may be lowered while a completion is interrupted."""
    script = Script(sampling=wire.Sampling(max_tokens=1))
    script.start_run()
    result = valid()
    result.put(4, np.array([1, 0, 0, 1], np.uint8), "loss_mask")
    for index in (0, 1):
        result.change(index, num_masked=1)
    result.send(script)
    assert any(isinstance(write.record, CompletionsStored) for write in script.journal)


def partial_of(num: int) -> wire.GroupInterrupted:
    """Return an interrupted group with `num` tokens of its first completion."""
    tensors = tuple(wire.TensorMeta(dtype=kind, shape=(num,), nbytes=4 * num) for kind in ("int32", "float32", "int32"))
    partial = (wire.PartialCompletionMeta(num_tokens=num), wire.PartialCompletionMeta(num_tokens=0))
    return wire.GroupInterrupted(lease="generate:t0:0", reason="it leaves", partial=partial, tensors=tensors)


@pytest.mark.parametrize("num", [4, 5])
def test_partial_completion_with_more_tokens_than_were_allowed_is_thrown_away(num: int) -> None:
    """A journal of any size would fill up with them, and others would continue from them."""
    script = Script(sampling=wire.Sampling(max_tokens=4))
    script.start_run()
    script.receive("rollout-0", partial_of(num), *(bytes(4 * num),) * 3)
    assert any(isinstance(write.record, PartialCompletionsStored) for write in script.journal) == (num == 4)


@pytest.mark.parametrize("is_lowered", [False, True])
@pytest.mark.parametrize("num", [4, 5])
def test_work_of_an_earlier_controller_has_no_more_tokens_than_the_run_ever_allowed(num: int, is_lowered: bool) -> None:
    script = Script(sampling=wire.Sampling(max_tokens=4))
    script.start_run()
    [lease, _] = script.state.replicas.leases.of("rollout-0", "generate")
    if is_lowered:
        script.receive("operator-0", wire.ChangeSetting(request="a", key="sampling.max_tokens", value=2))
    journal = [JournalEntry(write.record, write.payload) for write in script.journal]
    script.controller = Controller(
        script.plan, Stream("train"), Stream("sft"), script.held_out, journal=journal, incarnation=2
    )
    script.state = script.controller.state
    script.start_run()
    result = valid()
    for index in (1, 2, 3):
        result.put(index, np.zeros(2 + num, KINDS[index][0]))
    result.change(0, num_tokens=num)
    script.journal.clear()
    result.send(script, lease)
    assert any(isinstance(write.record, CompletionsStored) for write in script.journal) == (num == 4)
    assert "rollout-0" in script.state.replicas.membership.members


@pytest.mark.parametrize("num", [225_000_000, 225_000_001])
def test_tensor_that_the_journal_can_not_store_is_refused(num: int) -> None:
    """SQLite takes no value of more than 10^9 bytes: the controller would end, and end again after each restart."""
    result = valid()
    result.tensors[0] = replace(result.tensors[0], shape=(num,), nbytes=4 * num)
    result.buffers[0] = bytes(4 * num)  # pages of zeros, which take no memory until they are read
    if 4 * num > 900_000_000:
        with pytest.raises(UnusableResultError, match="a tensor of 900000004 bytes came"):
            check_group_forms(result.trajectories, result.tensors, result.buffers)
    else:
        check_group_forms(result.trajectories, result.tensors, result.buffers)


def test_tensor_of_a_teacher_that_the_journal_can_not_store_is_refused() -> None:
    shapes = {"teacher_logprobs": (1,), "teacher_top_ids": (1, 225_000_001), "teacher_top_logprobs": (1, 225_000_001)}
    kinds = {"teacher_top_ids": "int32"}
    tensors = [
        wire.TensorMeta(dtype=kinds.get(name, "float32"), shape=shape, nbytes=4 * shape[-1], name=name)
        for name, shape in shapes.items()
    ]
    with pytest.raises(UnusableResultError, match="a tensor of 900000004 bytes came"):
        teacher_arrays(tensors, [bytes(meta.nbytes) for meta in tensors])


def test_valid_completions_are_stored() -> None:
    script = Script(sampling=wire.Sampling(max_tokens=4, top_k=8, logprobs="truncated"))
    script.start_run()
    result = valid()
    result.put(4, np.array([1, 0, 1, 1], np.uint8), "loss_mask")
    result.put(5, np.array([2, 0, 1, 0], np.int32), "kept_counts")
    result.put(6, np.array([0, 7, 0], np.int32), "kept_ids")
    result.change(0, num_masked=1, reward=-2.5, metrics={"won": 1.0}, truncation_nats=0.25)
    result.temperature = 1.0
    result.send(script)
    group = script.state.buffer.get(0)
    assert group is not None
    assert group.state is GroupState.GENERATED


def test_kept_tokens_of_a_run_that_is_resumed_without_them_are_generated_again() -> None:
    script = Script(sampling=wire.Sampling(max_tokens=4, top_k=8, logprobs="truncated"))
    script.start_run()
    result = valid()
    result.put(4, np.array([2, 1, 1, 1], np.int32), "kept_counts")
    result.put(5, np.array([0, 7, 0, 0, 0], np.int32), "kept_ids")
    result.send(script)
    script.plan = dataclasses.replace(script.plan, sampling=wire.Sampling(max_tokens=4))
    script.restart()
    script.advance_time(1)
    group = script.state.buffer.get(0)
    assert group is not None
    assert (group.state, group.tries) == (GroupState.WAITING, 0)


def test_kept_tokens_are_refused_where_none_are_recorded() -> None:
    script = Script()
    script.start_run()
    result = valid()
    _kept([1, 1, 1, 1], [0, 0, 0, 0])(result)
    result.send(script)
    assert "kept tokens came, and sampling.logprobs is 'full'" in reason(script)


@pytest.mark.parametrize("case", list(MALFORMED))
def test_rollout_that_sends_a_malformed_result_is_evicted_when_there_is_another(case: str) -> None:
    script = Script()
    script.start_run("rollout-0", "rollout-1", slots=1)
    result = valid()
    MALFORMED[case][0](result)
    lease = next(lease.id for lease in script.state.replicas.leases.all_of("rollout-1"))
    lines = result.send(script, script.aliases.short(lease), "rollout-1")
    assert "(invalid rollout-1)" in lines
    assert "rollout-1" not in script.state.replicas.membership.members
    assert not script.state.lifecycle.failure


@pytest.mark.parametrize("case", list(UNUSABLE))
def test_rollout_with_an_unusable_result_is_kept(case: str) -> None:
    script = Script()
    script.start_run("rollout-0", "rollout-1", slots=1)
    result = valid()
    UNUSABLE[case][0](result)
    lease = next(lease.id for lease in script.state.replicas.leases.all_of("rollout-1"))
    result.send(script, script.aliases.short(lease), "rollout-1")
    assert "rollout-1" in script.state.replicas.membership.members


def test_name_with_three_invalid_results_is_not_admitted_again() -> None:
    script = Script(max_tries=9)
    script.start_run("rollout-0", "rollout-1", slots=1)
    for incarnation in (1, 2, 3):
        if incarnation > 1:
            script.joins("rollout-1", slots=1, incarnation=incarnation)
            lease = f"adopt:0:{script.attempt_of('rollout-1', 'adopt:0')}"
            script.receive("rollout-1", _adopted(script, lease), incarnation=incarnation)
        [lease] = [script.aliases.short(lease.id) for lease in script.state.replicas.leases.all_of("rollout-1")]
        result = wire.GroupGenerated(lease=lease, trajectories=(), tensors=())
        script.receive("rollout-1", result, incarnation=incarnation)
    lines = script.joins("rollout-1", slots=1, incarnation=4)
    assert any("rollout-1 has sent an invalid result, or none in time, 3 times" in line for line in lines), lines


def _adopted(script: Script, lease: str) -> wire.WeightsAdopted:
    return wire.WeightsAdopted(
        lease=lease, version=0, root=offer_of(0).root, pull_s=0.0, pause_s=0.0, size_bytes=16, transport="local"
    )


def test_texts_that_a_scorer_can_be_sent_are_the_limit() -> None:
    """What passes is small enough for the message to the scorer, prompt included."""
    for num_bytes in (10 << 20, 17 << 20):
        script = Script(group_size=64, sampling=wire.Sampling(max_tokens=1000))
        script.start_run()
        result = valid()
        result.trajectories = [replace(result.trajectories[0], num_tokens=1000, text="y" * (num_bytes // 64))] * 64
        for index in (1, 2, 3):
            result.put(index, np.zeros(64_000, KINDS[index][0]))
        result.send(script)
        scored = [send.message for send in script.sent if isinstance(send.message, wire.ScoreGroup)]
        assert bool(scored) == (num_bytes < codec.MAX_MESSAGE_BYTES)
        for message in scored:
            envelope = wire.Envelope(protocol=1, run="r", sender="controller-0", incarnation=1, seq=1)
            codec.pack(envelope, message)


def test_texts_beside_a_prompt_with_large_images_are_limited() -> None:
    image = wire.Media(kind="image", uri="data:image/png;base64," + "A" * (15 << 20))
    prompt = wire.Prompt(id="p", text="x", media=(image,))
    meta = replace(valid().trajectories[0], text="y" * (1 << 20))
    with pytest.raises(UnusableResultError, match="2097408 bytes of text"):
        check_trajectories([meta, meta], 0, prompt)
    check_trajectories([replace(meta, text="y")] * 2, 0, prompt)


# --- partial completions ----------------------------------------------------------------------------------------------


def with_kept(
    message: wire.GroupInterrupted, buffers: list[bytes], counts: list[int], ids: list[int], name: str = "kept_ids"
) -> tuple[wire.GroupInterrupted, list[bytes]]:
    """Add the tokens that were kept."""
    tensors = [
        wire.TensorMeta(dtype="int32", shape=(len(one),), nbytes=4 * len(one), name=title)
        for title, one in (("kept_counts", counts), (name, ids))
    ]
    arrays = [np.array(one, np.int32).tobytes() for one in (counts, ids)]
    return replace(message, tensors=(*message.tensors, *tensors)), [*buffers, *arrays]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m, b: (replace(m, tensors=(replace(m.tensors[0], dtype="int64"), *m.tensors[1:])), b), "is int64"),
        (lambda m, b: (m, [b[0], struct.pack("<f", float("nan")) * 4, b[2]]), "not finite"),
        (lambda m, b: (m, [b[0], struct.pack("<f", -3.4e38) * 4, b[2]]), "to 0 are usable"),
        (lambda m, b: (m, [struct.pack("<i", -1) * 4, *b[1:]]), "negative token id"),
        (lambda m, b: (replace(m, tensors=(*m.tensors, m.tensors[0])), [*b, b[0]]), "a tensor '' came"),
        (lambda m, b: (replace(m, temperature=float("inf")), b), "temperature"),
        (lambda m, b: with_kept(m, b, [1, 1, 1], [0, 0, 0]), "3 sets of kept tokens came with 4 tokens"),
        (lambda m, b: with_kept(m, b, [1, 1, 1, 1], [0, 3, 0, 0]), "token 1 is not among"),
        (lambda m, b: with_kept(m, b, [1] * 4, [0] * 4, "loss_mask"), "'loss_mask'|tensor of loss_mask"),
        (
            lambda m, b: (replace(m, partial=(replace(m.partial[0], status=wire.Status.ENV_ERROR), m.partial[1])), b),
            "env_error",
        ),
    ],
)
def test_invalid_partial_completions_are_thrown_away(change: Callable[..., Any], complaint: str) -> None:
    script = Script()
    script.start_run()
    tensors = tuple(wire.TensorMeta(dtype=kind, shape=(4,), nbytes=16) for kind in ("int32", "float32", "int32"))
    partial = (wire.PartialCompletionMeta(num_tokens=2),) * 2
    message = wire.GroupInterrupted(
        lease="generate:t0:0", reason="it leaves", partial=partial, tensors=tensors, temperature=1.0
    )
    message, buffers = change(message, [bytes(16)] * 3)
    script.receive("rollout-0", message, *buffers)
    [note] = [c for c in script.commands if isinstance(c, Note) and c.kind == "interrupted"]
    assert re.search(complaint, note.fields["thrown_away"])
    assert not any(isinstance(write.record, PartialCompletionsStored) for write in script.journal)


# --- rewards and teachers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"rewards": (float("nan"), 1.0)}, "a reward is nan"),
        ({"rewards": (float("-inf"), 1.0)}, "a reward is -inf"),
        ({"rewards": (1e300, 1.0)}, "a reward is 1e+300"),
        ({"rewards": (1.0,)}, "1 rewards and 2 statuses came of 2"),
        ({"statuses": (wire.Status.OK,)}, "2 rewards and 1 statuses came of 2"),
        ({"components": {"right": (1.0,)}}, "1 scores of 'right' came of 2"),
        ({"components": {"right": (1.0, float("nan"))}}, "a score of right is nan"),
        ({"components": {"x" * 300: (1.0, 1.0)}}, "came of 2"),
        ({"components": {str(n): (1.0, 1.0) for n in range(65)}}, "65 scores came, and 64 are allowed"),
    ],
)
def test_invalid_rewards_are_a_failed_try_and_never_stored(fields: dict[str, Any], complaint: str) -> None:
    script = Script()
    script.start_run()
    script.generates("rollout-0", "generate:t0:0")
    scored = wire.GroupScored(lease="score:t0:0", rewards=(1.0, 0.0), statuses=(wire.Status.OK,) * 2)
    script.receive("reward-0", replace(scored, **fields))
    assert complaint in reason(script)
    assert not any(isinstance(write.record, RewardsStored) for write in script.journal)


@pytest.mark.parametrize(("num_scorers", "most"), [(3, 64), (100, 100)])
def test_group_has_the_scores_of_as_many_scorers_as_the_recipe_has(num_scorers: int, most: int) -> None:
    script = Script(num_scorers=num_scorers)
    script.start_run()
    for number, num in enumerate((most, most + 1)):
        script.generates("rollout-0", f"generate:t{number}:0")
        scores = {f"task {index}/math": (1.0, None) for index in range(num)}
        scored = wire.GroupScored(
            lease=f"score:t{number}:0", rewards=(1.0, 0.0), statuses=(wire.Status.OK,) * 2, components=scores
        )
        script.receive("reward-0", scored)
    [stored] = [write.record for write in script.journal if isinstance(write.record, RewardsStored)]
    assert (stored.key, len(stored.components)) == ("t0", most)
    assert f"{most} are allowed" in reason(script)


@pytest.mark.parametrize(
    ("index", "array", "complaint"),
    [
        (0, np.array([0, np.nan], np.float32), "not finite"),
        (0, np.zeros(2, np.float64), "is float64"),
        (1, np.array([[1], [-1]], np.int32), "negative token id"),
        (2, np.zeros((2, 3), np.float32), "likeliest tokens"),
        (2, np.array([[0], [-np.inf]], np.float32), "not finite"),
    ],
)
def test_invalid_teacher_logprobs_are_a_failed_try(index: int, array: np.ndarray[Any, Any], complaint: str) -> None:
    script = teach(index, array)
    assert complaint in reason(script)
    assert not any(isinstance(write.record, TeacherLogprobsStored) for write in script.journal)


@pytest.mark.filterwarnings("error")
def test_values_whose_squares_overflow_are_read_without_a_warning() -> None:
    script = teach(2, np.array([[0], [-3e38]], np.float32))
    assert "not finite" not in reason(script)


def teach(index: int, array: np.ndarray[Any, Any]) -> Script:
    """Send the log-probabilities of a teacher, with `array` in the place `index` of three valid ones."""
    script = Script(num_teachers=1)
    script.start_run()
    script.generates("rollout-0", "generate:t0:0")
    arrays: list[np.ndarray[Any, Any]] = [np.zeros(2, np.float32), np.ones((2, 1), np.int32), np.zeros((2, 1), "f4")]
    arrays[index] = array
    names = ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
    tensors = tuple(
        wire.TensorMeta(dtype=one.dtype.name, shape=one.shape, nbytes=one.nbytes, name=name)
        for one, name in zip(arrays, names, strict=True)
    )
    script.receive("teacher-0", wire.TokensScored(lease="teach:t0:0", tensors=tensors), *(a.tobytes() for a in arrays))
    return script


@given(st.data())
def test_no_change_of_a_result_is_stored_that_a_policy_cannot_read(data: st.DataObject) -> None:
    """Whatever was stored decodes by the policy's own decoder."""
    script = Script()
    script.start_run()
    result = valid()
    for _ in range(data.draw(st.integers(0, 3))):
        change, _ = data.draw(st.sampled_from([*MALFORMED.values(), *UNUSABLE.values()][:-1]))
        change(result)
    for index in range(len(result.tensors)):
        if data.draw(st.booleans()):
            fields = {
                "dtype": data.draw(st.sampled_from(["int32", "float32", "int64", "uint8", "object"])),
                "shape": tuple(data.draw(st.lists(st.integers(-2, 5), max_size=3))),
                "name": data.draw(
                    st.sampled_from(["", "loss_mask", "kept_counts", "kept_ids", "routing", "position_ids"])
                ),
            }
            name = data.draw(st.sampled_from(list(fields)))
            result.tensors[index] = replace(result.tensors[index], **{name: fields[name]})
    result.send(script)
    group = script.state.buffer.get(0)
    assert group is not None
    if group.state is GroupState.GENERATED:
        scored = tuple(
            wire.ScoredTrajectory(num_tokens=t.num_tokens, oldest_version=0, reward=0.0) for t in group.trajectories
        )
        message = wire.TrainGroup(prompt_id="p", trajectories=scored, tensors=group.tensors)
        groups_from_wire([message], group.buffers)


# --- one bad replica --------------------------------------------------------------------------------------------------


def test_replica_that_fails_whatever_it_is_given_does_not_end_the_run() -> None:
    script = Script(max_tries=0, num_rollouts=2)
    script.start_run("rollout-0", "rollout-1", slots=1)
    for _ in range(20):
        for lease in script.state.replicas.leases.all_of("rollout-1"):
            if lease.kind == "generate":
                script.fails("rollout-1", script.aliases.short(lease.id), fatal=True)
        script.advance_time(0.1)
    assert not script.state.lifecycle.failure
    assert "rollout-1" not in script.state.replicas.membership.members


def test_replicas_that_all_fail_end_the_run_with_the_reason() -> None:
    script = Script(max_tries=0, num_rollouts=2)
    script.start_run("rollout-0", "rollout-1", slots=1)
    for _ in range(20):
        for name in ("rollout-0", "rollout-1"):
            for lease in script.state.replicas.leases.all_of(name):
                if lease.kind == "generate":
                    script.fails(name, script.aliases.short(lease.id), fatal=True)
        script.advance_time(0.1)
    assert "were all discarded" in script.state.lifecycle.failure


# --- journals with poisoned groups ------------------------------------------------------------------------------------


def poisoned(script: Script, key: str = "t0") -> list[JournalEntry]:
    """Return the records of `script` as an older controller may have written them: with one tensor of 0 bytes."""
    entries = []
    for write in script.journal:
        record, payload = write.record, write.payload
        if isinstance(record, CompletionsStored) and record.key == key:
            bad = wire.TensorMeta(dtype="float64", shape=(2,), nbytes=0)
            record = replace(record, tensors=(*record.tensors[:2], bad, *record.tensors[3:]))
            payload = (*payload[:2], b"", *payload[3:])
        entries.append(JournalEntry(record, payload))
    return entries


def resumed(before: Script, entries: list[JournalEntry]) -> Script:
    """Return the script of a controller that resumes from these records."""
    script = Script(before.plan)
    script.aliases = before.aliases
    script.journal = list(before.journal)
    script.controller = Controller(
        before.plan, Stream("train"), Stream("sft"), before.held_out, journal=entries, incarnation=2
    )
    script.state = script.controller.state
    return script


def finish_run(script: Script) -> None:
    """Let all replicas of a resumed run do their work until it is over."""
    script.advance_time(10.0)
    for role in ("policy", "reward", "rollout"):
        has_layout, version = role != "reward", 0 if role == "policy" else -1
        hello = wire.Hello(
            role=role, host="h", pid=1, num_slots=8, version=version, has_layout=has_layout, serves=role == "policy"
        )
        layout = (encoded_layout(f"{role}-0"),) if has_layout else ()
        script.receive(f"{role}-0", hello, *layout, incarnation=2)
    for _ in range(40):
        for name in ("policy-0", "rollout-0", "reward-0"):
            for lease in script.state.replicas.leases.all_of(name):
                short = script.aliases.short(lease.id)
                _work(script, name, lease.kind, short)
        script.advance_time(0.1)


def _work(script: Script, name: str, kind: str, short: str) -> None:
    subject = short.split(":")[1]
    member = script.state.replicas.membership.members[name]
    match kind:
        case "generate":
            message_version = member.version
            num = 2
            meta = wire.TrajectoryMeta(
                status=wire.Status.OK, num_tokens=1, text="y", oldest_version=message_version,
                newest_version=message_version,
            )  # fmt: skip
            kinds = (("int32", 1), ("int32", num), ("float32", num), ("int32", num))
            tensors = tuple(wire.TensorMeta(dtype=kind, shape=(n,), nbytes=4 * n) for kind, n in kinds)
            buffers = (bytes(4), bytes(8), bytes(8), struct.pack("<i", message_version) * num)
            generated = wire.GroupGenerated(lease=short, trajectories=(meta,) * num, tensors=tensors)
            script.receive(name, generated, *buffers, incarnation=2)
        case "score":
            scored = wire.GroupScored(lease=short, rewards=(1.0, 0.0), statuses=(wire.Status.OK,) * 2)
            script.receive(name, scored, incarnation=2)
        case "train":
            script.receive(name, wire.StepTrained(lease=short, step=int(subject), metrics={}), incarnation=2)
        case "publish":
            published = wire.WeightsPublished(lease=short, version=int(subject), publish_s=0.0)
            script.receive(name, published, encoded_offer(int(subject)), incarnation=2)
        case "adopt":
            script.receive(
                name, replace(_adopted(script, short), version=int(subject), root=_root(subject)), incarnation=2
            )
        case "checkpoint":
            script.receive(name, wire.CheckpointSaved(lease=short, step=int(subject), path="/c"), incarnation=2)


def _root(version: str) -> str:
    return offer_of(int(version)).root


@pytest.mark.parametrize("poison", ["t0", "t1"])
def test_resumed_run_takes_a_poisoned_group_out_of_its_step(poison: str) -> None:
    before = Script()
    before.start_run()
    before.generate_and_score(0, 1)
    assert before.state.buffer.frozen_groups(1), "the step was dispatched"
    script = resumed(before, poisoned(before, poison))
    script.advance_time(0.1)
    lines = [line for line in script.log if line.startswith("journal")]
    assert lines[:2] == ["journal <- StepReopened", "journal <- GroupRequeued"]
    finish_run(script)
    assert script.state.version == 2, script.log[-5:]
    trained = [c for c in script.log if "<- train:1" in c]
    assert trained[-1].endswith("train0 train1"), "every prompt is trained"


@pytest.mark.parametrize("scored", [False, True])
def test_resumed_run_generates_a_poisoned_group_again_before_it_is_frozen(scored: bool) -> None:
    before = Script()
    before.start_run()
    before.generates("rollout-0", "generate:t0:0")
    if scored:
        before.scores("score:t0:0")
    script = resumed(before, poisoned(before))
    script.advance_time(0.1)
    assert "journal <- GroupRequeued" in script.log
    finish_run(script)
    assert script.state.version == 2


def test_reopened_step_is_restored_from_the_journal() -> None:
    before = Script(dynamic_sampling=True)
    before.start_run(slots=4)
    before.generates("rollout-0", "generate:t0:0")
    before.scores("score:t0:0", 1.0, 1.0)  # filtered out
    before.generate_and_score(1, 2)
    assert [group.ordinal for group in before.state.buffer.frozen_groups(1)] == [1, 2]
    script = resumed(before, poisoned(before, "t2"))
    script.advance_time(0.1)
    again = resumed(script, [JournalEntry(write.record, write.payload) for write in script.journal])
    buffer, restored = script.state.buffer, again.state.buffer
    assert (restored.num_frozen_steps, restored.count(GroupState.SCORED)) == (0, 1)
    assert (restored.num_frozen_steps, restored._num_ready) == (buffer.num_frozen_steps, buffer._num_ready)
    assert restored._filtered == buffer._filtered == [(0, 1.0)]


# --- groups that a policy rejects -------------------------------------------------------------------------------------


def reject(script: Script, *prompts: str, name: str = "policy-0") -> list[str]:
    """The policy cannot train the groups of these prompts."""
    lease = next(held.id for held in script.state.replicas.leases.all_of(name) if held.kind == "train")
    failed = wire.LeaseFailed(
        lease=lease, status=wire.Status.INFRA_LOST, reason="token 99999", fatal=True, version=0, rejected=prompts
    )
    return script.receive(name, failed)


def test_group_that_a_policy_rejects_is_generated_again_and_trained() -> None:
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    lines = reject(script, "train1")
    assert not script.state.lifecycle.failure
    assert "rollout-0 <- generate:t1:1 train1 >= v0" in lines
    group = script.state.buffer.get(0)
    assert group is not None
    assert group.state is GroupState.SCORED, "the other group of the step is kept"
    lines = script.generate_and_score(1, attempt=1)
    assert "policy-0 <- train:1:1 train0 train1" in lines
    script.trains(1, 1)
    assert script.state.version == 1


def test_shares_of_other_policies_are_revoked_when_one_rejects_a_group() -> None:
    script = Script(num_policies=2)
    for name in ("policy-0", "policy-1"):
        hello = wire.Hello(role="policy", host="h", pid=1, version=0, has_layout=True, serves=True, peer="h:1")
        script.receive(name, hello, encoded_layout(name))
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.generate_and_score(0, 1)
    lines = reject(script, *[f"train{n}" for n in range(2)], name="policy-0")
    assert not script.state.replicas.leases.num("policy-1", "train")
    assert any(line.startswith("policy-1 <- release train:1") for line in lines)
    assert not script.state.lifecycle.failure


def test_policy_that_rejects_what_its_step_does_not_have_fails_the_run() -> None:
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    reject(script, "train7")
    assert "policy-0 could not train: token 99999" in script.state.lifecycle.failure


def test_group_that_is_rejected_too_often_is_discarded() -> None:
    script = Script(max_tries=0)
    script.start_run()
    script.generate_and_score(0, 1)
    lines = reject(script, "train0")
    assert "(discarded train0)" in lines
    assert [group.ordinal for group in script.state.buffer.live()] == [1, 2], "another prompt takes its place"


@pytest.mark.parametrize("num_masked", [0, 2])
def test_group_without_a_sampled_token_is_a_failed_try(num_masked: int) -> None:
    """A step of such groups could not be trained. An environment can end each of its episodes before a reply."""
    script = Script()
    script.start_run()
    result = valid()
    for index in range(2):
        result.change(index, num_tokens=num_masked, num_masked=num_masked)
    for index, dtype in ((1, np.int32), (2, np.float32), (3, np.int32)):
        result.put(index, np.zeros(2 * num_masked, dtype))
    if num_masked:
        result.put(4, np.zeros(2 * num_masked, np.uint8), "loss_mask")
    result.send(script)
    assert "none of its completions has a sampled token" in reason(script)
    assert "rollout-0" in script.state.replicas.membership.members, "its environment may be to blame"
