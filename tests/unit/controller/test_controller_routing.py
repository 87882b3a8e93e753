"""Recorded routing at the controller: what a replica may send, what is refused at the start, and what a policy gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from generated_results import Result, reason, valid
from hypothesis import given
from hypothesis import strategies as st
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.groups.group import GroupState
from starling.controller.core.groups.validation.limits import MESSAGE_BYTES
from starling.controller.core.groups.validation.validation import InvalidResultError, check_group_contents
from starling.controller.core.records import PartialCompletionsStored
from starling.policy.train.data.groups import groups_from_wire

REPLAYED = wire.Sampling(max_tokens=4, routing="replayed")
EXPERTS = wire.ModelExperts(num_layers=2, num_experts=5, num_chosen=3)
LIMITS = wire.ModelLimits(vocabulary_size=50, longest=64, experts=EXPERTS)
PROMPT, COMPLETIONS = 4, 5
"""Positions of the tensors."""

Array = np.ndarray[Any, Any]
Change = Callable[[Array, Array], tuple[Array, Array]]


def experts(num_tokens: int) -> Array:
    """Return different experts in each of two layers, and none for the last token."""
    found = np.stack([np.tile([[0, 1, 4], [3, 2, 1]], (1, 1)) for _ in range(num_tokens)]).astype(np.uint8)
    found[-1] = 255
    return found


def routed(change: Change = lambda prompt, completions: (prompt, completions)) -> Result:
    """Return a group with the experts of its tokens, changed."""
    result = valid()
    prompt, completions = change(experts(3), experts(4))
    result.put(PROMPT, prompt, "prompt_routing")
    result.put(COMPLETIONS, completions, "routing")
    return result


def started(limits: wire.ModelLimits | None = LIMITS, **plan: Any) -> Script:
    script = Script(sampling=REPLAYED, **plan)
    script.start_run(limits=limits)
    return script


def put(array: Array, at: tuple[int, ...], value: int) -> Array:
    array[at] = value
    return array


LIES: dict[str, tuple[Change, str]] = {
    "fewer tokens": (lambda p, c: (p, c[:3]), "experts of 3 tokens came with 4 tokens"),
    "fewer tokens of the prompt": (lambda p, c: (p[:2], c), "experts of 2 tokens came with a prompt of 3"),
    "other layers of the prompt": (lambda p, c: (p[:, :1], c), "those of its completions uint8"),
    "other type of the prompt": (lambda p, c: (p.astype(np.uint16), c), "those of its completions uint8"),
    "one layer": (lambda p, c: (p[:, :1], c[:, :1]), "chooses 3 of 5 in each of 2 layers"),
    "two experts": (lambda p, c: (p[..., :2], c[..., :2]), "chooses 3 of 5 in each of 2 layers"),
    "no layer": (lambda p, c: (p[:, :0], c[:, :0]), "chooses 3 of 5|none of a layer"),
    "two bytes": (lambda p, c: (p.astype(np.uint16), c.astype(np.uint16)), "its experts are uint16"),
    "expert that is not there": (lambda p, c: (p, put(c, (0, 1, 2), 5)), "has expert 5, and the model has 5"),
    "expert of the prompt": (lambda p, c: (put(p, (0, 1, 2), 7), c), "has expert 7, and the model has 5"),
    "expert twice": (lambda p, c: (p, put(c, (1, 0, 2), 0)), "the same expert twice"),
    "some unrecorded": (lambda p, c: (p, put(c, (1, 1, 1), 255)), "only some of a token's experts"),
    "some recorded": (lambda p, c: (p, put(c, (3, 1, 1), 0)), "only some of a token's experts"),
    "other element type": (lambda p, c: (p, c.astype(np.int32)), "tensor of routing is int32"),
    "two dimensions": (lambda p, c: (p, c[:, 0]), "tensor of routing is uint8"),
}


def test_recorded_experts_reach_the_policy_and_no_teacher() -> None:
    script = started(prompts_per_step=1, num_teachers=1)
    result = routed()
    result.send(script)
    (asked,) = [send for send in script.sent if isinstance(send.message, wire.ScoreTokens)]
    assert len(asked.buffers) == 2
    script.scores("score:t0:0")
    script.scores_tokens("teach:t0:0", num_tokens=4)
    (train,) = [send for send in script.sent if isinstance(send.message, wire.TrainStep)]
    (group,) = groups_from_wire(train.message.groups, train.buffers, LIMITS)
    assert group.routing is not None
    assert group.routing.completions.tolist() == experts(4).tolist()
    assert group.routing.prompt.tolist() == experts(3).tolist()


@pytest.mark.parametrize("case", list(LIES))
def test_wrong_experts_are_a_rejected_result(case: str) -> None:
    change, complaint = LIES[case]
    script = started()
    routed(change).send(script)
    assert re.search(complaint, reason(script)), reason(script)
    assert not script.state.lifecycle.failure


@pytest.mark.parametrize("left_out", [PROMPT, COMPLETIONS])
def test_one_tensor_without_the_other_is_refused(left_out: int) -> None:
    result = routed()
    del result.tensors[left_out], result.buffers[left_out]
    with pytest.raises(InvalidResultError, match="without the other"):
        check_group_contents(result.trajectories, result.tensors, result.buffers, LIMITS)


def test_experts_of_a_model_that_is_not_known_are_checked_among_themselves() -> None:
    script = started(limits=None)
    routed().send(script)
    group = script.state.buffer.get(0)
    assert group is not None
    assert group.state is GroupState.GENERATED
    script = started(limits=None)
    routed(LIES["expert twice"][0]).send(script)
    assert "the same expert twice" in reason(script)


def test_experts_are_refused_where_none_are_recorded() -> None:
    script = Script()
    script.start_run(limits=LIMITS)
    routed().send(script)
    assert "experts of its tokens came, and sampling.routing is 'own'" in reason(script)


def test_result_without_the_experts_that_were_asked_for_is_a_failed_try() -> None:
    script = started()
    valid().send(script)
    assert "does not record the experts of its tokens; set sampling.routing = 'own'" in reason(script)


@pytest.mark.parametrize("with_experts", [True, False])
def test_partial_completions_are_resumed_with_their_experts(*, with_experts: bool) -> None:
    script = started()
    tensors = [wire.TensorMeta(dtype=kind, shape=(4,), nbytes=16) for kind in ("int32", "float32", "int32")]
    buffers = [bytes(16)] * 3
    if with_experts:
        tensors.append(wire.TensorMeta(dtype="uint8", shape=(4, 2, 3), nbytes=24, name="routing"))
        buffers.append(experts(4).tobytes())
    script.receive(
        "rollout-0",
        wire.GroupInterrupted(
            lease="generate:t0:0",
            reason="it leaves",
            partial=(wire.PartialCompletionMeta(num_tokens=2),) * 2,
            tensors=tuple(tensors),
            temperature=1.0,
        ),
        *buffers,
    )
    stored = [write.record for write in script.journal if isinstance(write.record, PartialCompletionsStored)]
    assert len(stored) == with_experts
    assert "rollout-0" in script.state.replicas.membership.members


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        (wire.ModelLimits(vocabulary_size=50), "needs a mixture of experts whose routers"),
        (
            wire.ModelLimits(experts=wire.ModelExperts(num_layers=60, num_experts=256, num_chosen=8)),
            "can take 2013265920 bytes",
        ),
        (wire.ModelLimits(experts=wire.ModelExperts(num_layers=1, num_experts=2, num_chosen=3)), "no model has"),
        (wire.ModelLimits(experts=wire.ModelExperts(num_layers=1, num_experts=1 << 15, num_chosen=3)), "no model has"),
    ],
)
def test_policy_whose_model_cannot_replay_is_refused(limits: wire.ModelLimits, complaint: str) -> None:
    script = Script(sampling=wire.Sampling(max_tokens=1 << 20, routing="replayed"))
    lines = script.joins("policy-0", limits=limits)
    assert any(complaint in line for line in lines), lines


def test_longer_completions_than_can_be_sent_are_refused() -> None:
    script = started(wire.ModelLimits(experts=wire.ModelExperts(num_layers=60, num_experts=256, num_chosen=8)))
    lines = script.receive("operator-0", wire.ChangeSetting(request="r", key="sampling.max_tokens", value=1e6))
    assert any("lower one of the two" in line for line in lines), lines


def test_experts_may_make_messages_larger() -> None:
    sizes = [started(max_model_len=64).controller.state.message_bytes()["rollout"]]
    script = Script(max_model_len=64)
    script.start_run(limits=LIMITS)
    state = script.controller.state
    sizes.append(state.message_bytes()["rollout"])
    assert sizes[0] - sizes[1] == 2 * 3 * 64 * (1 + state.plan.group_size)
    assert sizes[0] > MESSAGE_BYTES


@given(st.data())
def test_no_experts_are_stored_that_a_policy_cannot_read(data: st.DataObject) -> None:
    """Whatever passes here decodes by the policy's own decoder, with the same limits."""
    result = routed()
    for index in (PROMPT, COMPLETIONS):
        array = np.frombuffer(result.buffers[index], np.uint8).copy()
        for _ in range(data.draw(st.integers(0, 2))):
            array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.sampled_from([0, 1, 4, 5, 254, 255]))
        shape = data.draw(st.sampled_from([(-1, 2, 3), (-1, 2, 3), (-1, 3, 2), (-1, 1, 6), (-1, 6, 1)]))
        result.put(index, array.reshape(shape), result.tensors[index].name)
    script = started()
    result.send(script)
    group = script.state.buffer.get(0)
    assert group is not None
    if group.state is GroupState.GENERATED:
        scored = tuple(
            wire.ScoredTrajectory(num_tokens=t.num_tokens, oldest_version=0, reward=0.0) for t in group.trajectories
        )
        message = wire.TrainGroup(prompt_id="p", trajectories=scored, tensors=group.tensors)
        groups_from_wire([message], group.buffers, LIMITS)
