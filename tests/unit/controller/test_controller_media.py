"""Images and videos in results of rollouts: what the trained model cannot read is a failed try of its group."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from generated_results import Result, reason, valid
from msgspec.structs import replace
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.controller.core.groups.group import GroupState
from starling.controller.core.records import CompletionsStored, PartialCompletionsStored
from starling.sim.replicas.weights import encoded_layout

IMAGE, VIDEO = 7, 8
MEDIA = wire.MediaInputs(image_token_id=IMAGE, video_token_id=VIDEO, patch_values=2, merge_size=2, num_positions=10)
LIMITS = wire.ModelLimits(vocabulary_size=9, longest=100, media=MEDIA)
PIXELS, GRIDS, POSITIONS = 4, 5, 6
"""Positions of the tensors of an image."""


def shown() -> Result:
    """Return a group whose prompt has one image of four patches, merged into one token."""
    result = valid()
    result.put(0, np.array([0, IMAGE, 0], np.int32))
    result.put(PIXELS, np.zeros((4, 2), np.float32), "pixel_values")
    result.put(GRIDS, np.array([[1, 2, 2]], np.int64), "image_grid_thw")
    result.put(POSITIONS, np.zeros((3, 3), np.int32), "position_ids")
    return result


def grids(*rows: tuple[int, ...], num_patches: int = 4) -> Callable[[Result], None]:
    def change(result: Result) -> None:
        result.put(GRIDS, np.array(rows, np.int64).reshape(len(rows), -1 if rows else 3), "image_grid_thw")
        result.put(PIXELS, np.zeros((num_patches, 2), np.float32), "pixel_values")

    return change


def put(index: int, array: Any, name: str = "") -> Callable[[Result], None]:
    return lambda result: result.put(index, array, name)


def pixels(value: float) -> Callable[[Result], None]:
    array = np.zeros((4, 2), np.float32)
    array[2, 1] = value
    return put(PIXELS, array, "pixel_values")


def drop(*indices: int) -> Callable[[Result], None]:
    def change(result: Result) -> None:
        for index in sorted(indices, reverse=True):
            del result.tensors[index], result.buffers[index]

    return change


def positions(value: int) -> Callable[[Result], None]:
    array = np.zeros((3, 3), np.int32)
    array[1, 2] = value
    return put(POSITIONS, array, "position_ids")


def _as_video(result: Result) -> None:
    for index, name in ((PIXELS, "pixel_values_videos"), (GRIDS, "video_grid_thw")):
        result.tensors[index] = replace(result.tensors[index], name=name)


def _masked(result: Result, *, mask: int = 0) -> None:
    """Let an environment, or the model, have said the third token."""
    result.put(7, np.array([1, 1, mask, 1], np.uint8), "loss_mask")
    result.change(1, num_masked=1 - mask)


MALFORMED: dict[str, tuple[Callable[[Result], None], str]] = {
    "pixels beyond the grid": (grids((1, 2, 2), num_patches=5), "5 rows of pixel_values came, and .* describes 4"),
    "grid that overflows": (grids((2**31, 2**31, 4), num_patches=0), "three numbers from 1 to 65536"),
    "grid of 2^31": (grids((2**31, 1, 1)), "three numbers from 1 to 65536"),
    "negative grid": (grids((1, -2, -2)), "three numbers from 1 to 65536"),
    "grid of two columns": (grids((1, 4)), "three numbers from 1 to 65536"),
    "no image": (grids(num_patches=0), "describes 0 images, and its prompt has 1"),
    "image without patches": (grids((0, 2, 2), num_patches=0), "three numbers from 1 to 65536"),
    "two images": (grids((1, 2, 2), (1, 2, 2), num_patches=8), "describes 2 images, and its prompt has 1"),
    "video": (_as_video, "image_grid_thw describes 0 images, and its prompt has 1"),
    "text": (drop(PIXELS, GRIDS, POSITIONS), "describes 0 images, and its prompt has 1"),
    "grid without pixels": (drop(PIXELS), "one of pixel_values and image_grid_thw came without the other"),
    "pixels without a grid": (drop(GRIDS), "describes 0 images"),
    "no positions": (drop(POSITIONS), "position_ids are none instead of"),
    "positions of another prompt": (put(POSITIONS, np.zeros((3, 2), np.int32), "position_ids"), r"are \[3, 2\]"),
    "negative position": (positions(-1), "from -1 to 0"),
    "far position": (positions(1 << 30), "from 0 to 1073741824"),
}
UNUSABLE: dict[str, tuple[Callable[[Result], None], str]] = {
    "pixel NaN": (pixels(float("nan")), "not finite, or beyond 10000"),
    "pixel without end": (pixels(float("-inf")), "not finite, or beyond 10000"),
    "pixel that is too large": (pixels(-1e25), "not finite, or beyond 10000"),
}
OF_OTHER_MODELS: dict[str, tuple[Callable[[Result], None], str]] = {
    "wide patches": (put(PIXELS, np.zeros((4, 3), np.float32), "pixel_values"), "3 values in a patch, .* takes 2"),
    "narrow patches": (put(PIXELS, np.zeros((4, 0), np.float32), "pixel_values"), "0 values in a patch"),
    "grid that cannot be merged": (grids((1, 1, 4)), "no multiple of 2, which the model merges"),
    "fewer placeholders": (put(0, np.zeros(3, np.int32)), "0 placeholder tokens 7 where image_grid_thw describes 1"),
    "more placeholders": (put(0, np.full(3, IMAGE, np.int32)), "3 placeholder tokens 7 where .* describes 1"),
    "placeholder of videos": (put(0, np.array([VIDEO, IMAGE, 0], np.int32)), "1 placeholder tokens 8 where .* 0"),
    "sampled placeholder": (put(1, np.array([0, 0, IMAGE, 0], np.int32)), "completion has a placeholder token"),
    "sampled video": (put(1, np.array([0, 0, 0, VIDEO], np.int32)), "completion has a placeholder token"),
    "position beyond the context": (positions(10), "from 0 to 10, and the model has 10"),
    "prompt beyond the vocabulary": (put(0, np.array([0, IMAGE, 9], np.int32)), "token id 9, and the model has 9"),
    "token beyond the vocabulary": (put(1, np.array([0, 0, 9, 0], np.int32)), "token id 9, and the model has 9"),
}


def image_run(limits: wire.ModelLimits | None, *rollouts: str) -> Script:
    """Start a run in which each prompt has one image."""
    script = Script(num_rollouts=len(rollouts) or 1)
    script.start_run(*rollouts, slots=1 if rollouts else 2, limits=limits)
    for group in script.state.buffer.live():
        group.prompt = replace(group.prompt, media=(wire.Media(kind="image", uri="a.png"),))
    return script


def check_refused(script: Script, result: Result, complaint: str) -> None:
    """Send a result, and check that it is a failed try of its group."""
    result.send(script)
    group = script.state.buffer.get(0)
    assert group is not None
    assert (group.tries, group.trajectories) == (1, ())
    assert re.search(complaint, reason(script)), reason(script)
    assert not any(isinstance(write.record, CompletionsStored) for write in script.journal)


@pytest.mark.parametrize("limits", [None, LIMITS], ids=["any model", "known model"])
@pytest.mark.parametrize("case", [*MALFORMED, *UNUSABLE])
def test_invalid_images_are_a_failed_try_and_never_stored(case: str, limits: wire.ModelLimits | None) -> None:
    change, complaint = {**MALFORMED, **UNUSABLE}[case]
    result = shown()
    change(result)
    check_refused(image_run(limits), result, complaint)


@pytest.mark.parametrize("case", list(OF_OTHER_MODELS))
def test_images_that_the_model_does_not_take_are_a_failed_try(case: str) -> None:
    change, complaint = OF_OTHER_MODELS[case]
    result = shown()
    change(result)
    check_refused(image_run(LIMITS), result, complaint)


@pytest.mark.parametrize("case", [*MALFORMED, *OF_OTHER_MODELS])
def test_rollout_that_sends_invalid_images_is_evicted_when_there_is_another(case: str) -> None:
    script = image_run(LIMITS, "rollout-0", "rollout-1")
    result = shown()
    {**MALFORMED, **OF_OTHER_MODELS}[case][0](result)
    lease = next(lease.id for lease in script.state.replicas.leases.all_of("rollout-1"))
    assert "(invalid rollout-1)" in result.send(script, script.aliases.short(lease), "rollout-1")
    assert "rollout-1" not in script.state.replicas.membership.members
    assert not script.state.lifecycle.failure


@pytest.mark.parametrize("case", list(UNUSABLE))
def test_rollout_whose_images_have_wild_pixels_is_kept(case: str) -> None:
    """The processor of its model may give them."""
    script = image_run(LIMITS, "rollout-0", "rollout-1")
    result = shown()
    UNUSABLE[case][0](result)
    lease = next(lease.id for lease in script.state.replicas.leases.all_of("rollout-1"))
    result.send(script, script.aliases.short(lease), "rollout-1")
    assert "rollout-1" in script.state.replicas.membership.members


@pytest.mark.parametrize("token", [IMAGE, 9], ids=["placeholder", "beyond the vocabulary"])
@pytest.mark.parametrize("sampled", [False, True])
def test_rollout_is_kept_when_an_environment_gave_the_token(token: int, sampled: bool) -> None:
    script = image_run(LIMITS, "rollout-0", "rollout-1")
    result = shown()
    result.put(1, np.array([0, 0, token, 0], np.int32))
    _masked(result, mask=int(sampled))
    lease = next(lease.id for lease in script.state.replicas.leases.all_of("rollout-1"))
    result.send(script, script.aliases.short(lease), "rollout-1")
    assert re.search("placeholder token|token id 9", reason(script))
    assert ("rollout-1" in script.state.replicas.membership.members) is not sampled


@pytest.mark.parametrize("at", [0, 2], ids=["in its midst", "as its end"])
@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_rollout_is_kept_when_an_environment_began_with_the_token(token: int, at: int) -> None:
    """What an environment says before the first reply is in the prompt, if it says the same to all of a group."""
    script = Script(num_rollouts=2)
    script.start_run("rollout-0", "rollout-1", slots=1, limits=LIMITS)
    result = valid()
    prompt = np.zeros(3, np.int32)
    prompt[at] = token
    result.put(0, prompt)
    lease = next(lease.id for lease in script.state.replicas.leases.all_of("rollout-1"))
    result.send(script, script.aliases.short(lease), "rollout-1")
    assert "the prompt is text and has a placeholder token" in reason(script)
    assert "rollout-1" in script.state.replicas.membership.members
    assert not any(isinstance(write.record, CompletionsStored) for write in script.journal)


@pytest.mark.parametrize("limits", [None, LIMITS])
def test_valid_images_are_stored(limits: wire.ModelLimits | None) -> None:
    script = image_run(limits)
    shown().send(script)
    group = script.state.buffer.get(0)
    assert group is not None
    assert group.state is GroupState.GENERATED


def test_images_of_a_text_prompt_are_a_failed_try() -> None:
    """A model that reads only text would fail in the step that holds them."""
    script = Script()
    script.start_run()
    check_refused(script, shown(), "it has images or videos, and its prompt has none")


def test_images_of_a_text_prompt_are_a_failed_try_where_a_teacher_reads_it() -> None:
    """The prompt is innocent: it is generated again."""
    script = Script(num_teachers=1)
    script.start_run()
    check_refused(script, shown(), "it has images or videos, and its prompt has none")


def test_images_for_a_model_that_reads_text_are_a_failed_try() -> None:
    check_refused(image_run(replace(LIMITS, media=None)), shown(), "and the model reads only text")


@pytest.mark.parametrize("index", [0, 1])
def test_placeholder_in_a_group_of_text_is_a_failed_try(index: int) -> None:
    """The trainer would look for its image among those of the groups that are packed with it."""
    script = Script()
    script.start_run(limits=LIMITS)
    result = valid()
    result.put(index, np.array([0, 0, IMAGE, *[0] * index], np.int32))
    check_refused(script, result, "placeholder token")


def test_kept_token_beyond_the_vocabulary_is_a_failed_try() -> None:
    script = Script()
    script.start_run(limits=LIMITS)
    result = valid()
    result.put(4, np.array([2, 0, 0, 0], np.int32), "kept_counts")
    result.put(5, np.array([0, 9], np.int32), "kept_ids")
    check_refused(script, result, "token id 9, and the model has 9")


@pytest.mark.parametrize(("token", "complaint"), [(IMAGE, "placeholder token"), (9, "token id 9, and the model has 9")])
def test_partial_completions_that_no_rollout_could_resume_are_thrown_away(token: int, complaint: str) -> None:
    script = Script()
    script.start_run(limits=LIMITS)
    tensors = tuple(wire.TensorMeta(dtype=kind, shape=(4,), nbytes=16) for kind in ("int32", "float32", "int32"))
    partial = (wire.PartialCompletionMeta(num_tokens=2),) * 2
    message = wire.GroupInterrupted(
        lease="generate:t0:0", reason="it leaves", partial=partial, tensors=tensors, temperature=1.0
    )
    script.receive("rollout-0", message, np.array([0, token, 0, 0], np.int32).tobytes(), bytes(16), bytes(16))
    [note] = [c for c in script.commands if isinstance(c, Note) and c.kind == "interrupted"]
    assert complaint in note.fields["thrown_away"]
    assert not any(isinstance(write.record, PartialCompletionsStored) for write in script.journal)


def test_sequence_that_the_model_cannot_attend_to_is_a_failed_try() -> None:
    script = Script()
    script.start_run(limits=replace(LIMITS, longest=4))
    check_refused(script, valid(), "a sequence of 5 tokens, 3 of them of its prompt, .* attend to 4")


def test_evaluation_is_not_bound_by_the_sequences_that_are_trained() -> None:
    script = Script(evaluate_at_start=True)
    script.start_run(slots=8, limits=replace(LIMITS, longest=2))
    script.generates("rollout-0", "generate:e0:0", num=1)
    assert script.state.evaluations.current is not None
    group = script.state.evaluations.current.get(0)
    assert group is not None
    assert group.state is GroupState.GENERATED


@pytest.mark.parametrize("changes", [{"merge_size": 0}, {"patch_values": 0}, {"image_token_id": -1}])
def test_policy_with_impossible_limits_is_refused(changes: dict[str, int]) -> None:
    script = Script()
    lines = script.joins("policy-0", limits=replace(LIMITS, media=replace(MEDIA, **changes)))
    assert any("no model has the limits" in line for line in lines), lines
    hello = wire.Hello(role="policy", host="h", pid=1, version=0, has_layout=True, limits=LIMITS)
    script.receive("policy-0", hello, encoded_layout("policy-0"))
    assert script.state.training.limits == LIMITS
