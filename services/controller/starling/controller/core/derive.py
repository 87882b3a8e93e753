"""What follows from the present state, in the order of the walk.

| derivation  | consumes                       | waits for                                          |
|-------------|--------------------------------|----------------------------------------------------|
| `supervise` | supervised examples            | the policy                                         |
| `evaluate`  | held-out prompts               | the publication of the version to evaluate         |
| `publish`   | a version that rollouts need   | the step that makes it, and no open evaluation     |
| `adopt`     | a publication                  | a rollout that is behind                           |
| `admit`     | prompts                        | a slot, freed when a step publishes                |
| `dispatch`  | waiting groups                 | a rollout with a slot whose version is new enough  |
| `score`     | generated groups               | a reward replica with a slot                       |
| `train`     | scored groups, oldest first    | all groups of the step, and the order to publish   |
| `end`       | the last step                  | evaluation, checkpoint, every replica's farewell   |

Each is idempotent: called twice without an event in between, it does nothing the second time.
"""

from __future__ import annotations

import functools

import msgspec

from starling.common.errors import WeightsError
from starling.common.wire import messages as wire
from starling.controller.core.evaluation import Evaluation
from starling.controller.core.events import Finish
from starling.controller.core.finish import Stage
from starling.controller.core.ledger import Group, GroupState
from starling.controller.core.membership import Member
from starling.controller.core.plan import draw_seed
from starling.controller.core.state import State


def advance(state: State, now: float) -> None:
    """Derive everything."""
    if state.ending.stage is Stage.RUNNING:
        supervise(state, now)
        evaluate(state)
        publish(state, now)
        adopt(state, now)
        admit(state)
        dispatch(state, now)
        score(state, now)
        train(state, now)
    end(state, now)


def supervise(state: State, now: float) -> None:
    """Deal the next supervised step."""
    policy, plan = state.policy(), state.plan
    busy = state.leases.has("train") or state.ending.stopping
    if policy is None or busy or state.version >= plan.num_sft_steps:
        return
    first, step = state.version * plan.examples_per_step, state.version + 1
    examples = tuple(state.examples.prompt(first + i) for i in range(plan.examples_per_step))
    command = functools.partial(
        wire.TrainStep, step=step, examples=examples, num_steps=plan.num_sft_steps, ordinal=step
    )
    state.grant(policy, "train", step, now, lambda lease: command(lease=lease))


def publish(state: State, now: float) -> None:
    """Have the policy offer a version that rollouts need."""
    policy, version = state.policy(), state.version
    due = state.plan.needs_rollouts and version >= state.plan.num_sft_steps and version > state.rounds.version
    held = state.evaluation is not None or state.leases.has("publish")
    if policy is not None and due and not held:
        state.rounds.asked = version
        state.grant(policy, "publish", version, now, lambda lease: wire.PublishWeights(lease=lease, version=version))


def evaluate(state: State) -> None:
    """Close an evaluation that is done; open the one that is due."""
    plan, current = state.plan, state.evaluation
    if current is not None and current.done:
        state.note("evaluation", **current.summary())
        state.evaluated.append(current.version)
        current = state.evaluation = None
    due = [plan.num_sft_steps] if plan.evaluate_at_start else []
    due += [plan.last_step] if plan.evaluate_at_end else []
    for version in due:
        wanted = version not in state.evaluated and version == state.rounds.version and not state.ending.stopping
        if current is None and wanted:
            state.evaluation = Evaluation(version, state.held_out, plan.max_tries, len(state.evaluated))
            return


def adopt(state: State, now: float) -> None:
    """Have every rollout that is behind pull the newest version."""
    policy, rounds = state.policy(), state.rounds
    if policy is None or rounds.version < 0:
        return
    for member in state.membership.of("rollout"):
        if state.leases.of(member.name, "adopt") or not rounds.may_adopt(member.name, member.version, now):
            continue
        assert policy.layout is not None, "a policy joins with its layout"
        assert member.layout is not None, "a rollout joins with its layout"
        try:
            plan = rounds.plan(policy.layout, member.layout)
        except WeightsError as error:
            state.membership.leave(member.name)
            state.refuse(member.name, str(error))
            continue
        state.grant(
            member,
            "adopt",
            rounds.version,
            now,
            lambda lease: wire.AdoptWeights(lease=lease, version=rounds.version),
            (rounds.offer, plan),
        )


def admit(state: State) -> None:
    """Turn prompts into groups while there are slots."""
    for _ in range(0 if state.ending.stopping else state.ledger.free_slots()):
        state.ledger.admit(state.prompts.prompt(state.ledger.num_admitted))


def dispatch(state: State, now: float) -> None:
    """Give waiting groups to rollouts; those of an evaluation go first."""
    rollouts = state.membership.of("rollout")
    slots = {m.name: m.num_slots - len(state.leases.of(m.name, "generate")) for m in rollouts}
    if state.evaluation is not None:
        pinned = state.evaluation.version
        for group in state.evaluation.within(GroupState.WAITING):
            member = _most_free([m for m in rollouts if m.version == pinned], slots)
            if member is None:
                break
            group.min_version = pinned
            _generate(state, member, group, slots, now)
    if not _may_generate(state):
        return
    for rank, group in state.ledger.ranked_waiting():
        required = _required_version(state, rank)
        member = _most_free([m for m in rollouts if m.version >= required], slots)
        if member is None:
            return  # the groups behind it need at least as new a version
        group.min_version = required
        _generate(state, member, group, slots, now)


def score(state: State, now: float) -> None:
    """Give generated groups to reward replicas."""
    rewards = state.membership.of("reward")
    slots = {m.name: m.num_slots - len(state.leases.of(m.name, "score")) for m in rewards}
    books = (state.ledger,) if state.evaluation is None else (state.evaluation, state.ledger)
    for group in (group for book in books for group in book.within(GroupState.GENERATED)):
        if group.scoring:
            continue
        member = _most_free(rewards, slots)
        if member is None:
            return
        slots[member.name] -= 1
        group.scoring = True
        texts = [wire.CompletionText(text=t.text, status=t.status, num_tokens=t.num_tokens) for t in group.trajectories]
        command = functools.partial(wire.ScoreGroup, prompt=group.prompt, completions=tuple(texts))
        state.grant(member, "score", group.key, now, lambda lease, command=command: command(lease=lease))  # type: ignore[misc]


def train(state: State, now: float) -> None:
    """Seal the next step when its groups are scored, and deal it to the policy.

    The version that it starts from need not be on offer yet: the policy makes its snapshot first, and digests it
    while it trains. One version at most is on its way so, for the next publication waits for the one before.
    """
    policy, plan = state.policy(), state.plan
    busy = state.leases.has("train") or state.ending.stopping
    if policy is None or busy or state.version < plan.num_sft_steps or state.rounds.asked < state.version:
        return
    sealed = state.ledger.seal(state.version + 1)
    if not sealed:
        return
    command = functools.partial(
        wire.TrainStep,
        step=state.version + 1,
        groups=tuple(_train_group(group) for group in sealed),
        temperature=plan.sampling.temperature or 1.0,
        num_steps=plan.num_steps,
        ordinal=state.version + 1 - plan.num_sft_steps,
        published=state.version,
    )
    buffers = tuple(buffer for group in sealed for buffer in group.buffers)
    state.grant(policy, "train", state.version + 1, now, lambda lease: command(lease=lease), buffers)


def end(state: State, now: float) -> None:
    """Take the next stage of the end when the one before is complete."""
    ending, policy = state.ending, state.policy()
    if ending.stage is Stage.RUNNING and _complete(state) and policy is not None:
        ending.stage, step = Stage.CHECKPOINTING, state.version
        if step == 0:
            ending.drain(now)
        else:
            state.grant(policy, "checkpoint", step, now, lambda lease: wire.SaveCheckpoint(lease=lease, step=step))
    if ending.stage is Stage.RUNNING and ending.stopping and policy is None:
        ending.drain(now)
    if ending.stage is Stage.DRAINING and not ending.told:
        ending.told = True
        for name in sorted(state.membership.members):
            state.send(name, wire.Drain(reason=ending.reason))
    if ending.stage is Stage.DRAINING and (not state.membership.members or now >= ending.deadline):
        for name in sorted(state.membership.members):
            state.note("left", replica=name, reason=f"it did not leave within {state.plan.drain_s:g} s", num_leases=0)
        ending.stage = Stage.OVER
        state.out.append(Finish(ok=not ending.failure, reason=ending.reason))


def _complete(state: State) -> bool:
    """Say whether nothing is left to do but the checkpoint."""
    if state.leases.has("train") or state.leases.has("publish"):
        return False
    if state.ending.stopping:
        return True
    plan = state.plan
    published = state.rounds.version >= state.version or not plan.needs_rollouts
    evaluated = state.evaluation is None and (not plan.evaluate_at_end or plan.last_step in state.evaluated)
    return state.version >= plan.last_step and published and evaluated


def _may_generate(state: State) -> bool:
    """Say whether training groups may be generated: all first replicas are there, and nobody wants to stop."""
    if state.ending.stopping or state.rounds.version < 0:
        return False
    members, plan = state.membership, state.plan
    full = len(members.of("rollout")) >= plan.num_rollouts and len(members.of("reward")) >= plan.num_rewards
    return full or state.ledger.num_sealed > 0


def _required_version(state: State, rank: int) -> int:
    """Return the oldest version that may sample for a live group of this rank.

    The published version is the base of rank 0's step, so rank r's step has the base ``published + r // P``, of
    which at most `max_staleness` may be missing.
    """
    base = state.rounds.version + rank // state.plan.prompts_per_step
    return max(state.plan.num_sft_steps, base - state.plan.max_staleness)


def _most_free(members: list[Member], slots: dict[str, int]) -> Member | None:
    free = [m for m in members if slots[m.name] > 0]
    return max(free, key=lambda m: slots[m.name] / m.num_slots, default=None)


def _generate(state: State, member: Member, group: Group, slots: dict[str, int], now: float) -> None:
    plan, book = state.plan, state.ledger if group.purpose == "train" else state.evaluation
    assert book is not None
    sampling = plan.sampling if group.purpose == "train" else plan.eval_sampling
    seed = draw_seed(plan.seed, group.purpose, group.ordinal, group.tries)
    slots[member.name] -= 1
    book.move(group, GroupState.LEASED)
    state.grant(
        member,
        "generate",
        group.key,
        now,
        lambda lease: wire.GenerateGroup(
            lease=lease,
            purpose=group.purpose,
            prompt=group.prompt,
            num_completions=plan.num_completions(group.purpose),
            sampling=msgspec.structs.replace(sampling, seed=seed),
            min_version=group.min_version,
        ),
    )


def _train_group(group: Group) -> wire.TrainGroup:
    trajectories = tuple(
        wire.ScoredTrajectory(num_tokens=t.num_tokens, oldest_version=t.oldest_version, reward=reward, status=t.status)
        for t, reward in zip(group.trajectories, group.rewards, strict=True)
        if reward is not None
    )
    return wire.TrainGroup(prompt_id=group.prompt.id, trajectories=trajectories, tensors=group.tensors)
