"""Admission of prompts as groups, and the bounds that hold for each live group.

Stop 1 of the walk. Slots bound the number of live groups, and so the staleness of every trained token; the proof is in
`docs/explanation/staleness.md`.
"""

from __future__ import annotations

from starling.algo.staleness import oldest_allowed_version
from starling.common.ids import Purpose
from starling.common.wire.messages import Prompt, Sampling
from starling.controller.core.dirty import Dirty
from starling.controller.core.groups.group import Group
from starling.controller.core.records import GroupsOpened
from starling.controller.core.state import ControllerState


def admit(state: ControllerState) -> None:
    """Turn prompts into groups while there are slots."""
    num, first = state.buffer.num_free_slots(), state.buffer.num_admitted
    if num == 0 or state.lifecycle.stopping:
        return
    state.outbox.write(GroupsOpened(first=first, num=num))
    admit_prompts(state, num)
    state.dirty |= Dirty.DISPATCH


def admit_prompts(state: ControllerState, num: int) -> None:
    """Turn the next `num` prompts into groups."""
    for _ in range(num):
        prompt = state.data.prompts.prompt(state.buffer.num_admitted)
        state.buffer.admit(prompt, expected_tokens(state, prompt, "train", state.plan.group_size))


def expected_tokens(state: ControllerState, prompt: Prompt, purpose: Purpose, num_completions: int) -> int:
    """Return how many tokens the completions of a prompt are expected to have together."""
    limit = float(sampling(state, purpose).max_tokens)
    return max(1, round(num_completions * state.replicas.lengths.expected(prompt.id, purpose, limit)))


def required_version(state: ControllerState, group: Group) -> int:
    """Return the oldest version that may sample for a live group.

    No version is older than the first that this run publishes.
    """
    plan, buffer = state.plan, state.buffer
    if not plan.kind.trains:
        return 0
    rank = buffer.rank(group)
    oldest = oldest_allowed_version(state.weights.version, rank, plan.prompts_per_step, buffer.max_staleness)
    return max(plan.num_supervised_steps, plan.begin_version, oldest)


def newest_allowed(state: ControllerState, group: Group) -> int:
    """Return the newest version that a token of a live group can be of."""
    evaluation = state.evaluations.current
    if group.purpose == "evaluate" and evaluation is not None:
        return evaluation.version
    return state.weights.version


def num_completions(state: ControllerState, purpose: Purpose) -> int:
    """Return how many completions a group of this purpose has now."""
    evaluation = state.evaluations.current
    if purpose == "evaluate" and evaluation is not None:
        return evaluation.num_completions
    return state.plan.num_completions(purpose)


def sampling(state: ControllerState, purpose: Purpose) -> Sampling:
    """Return how tokens are sampled for a group of this purpose now."""
    return state.plan.eval_sampling if purpose == "evaluate" else state.training.sampling
