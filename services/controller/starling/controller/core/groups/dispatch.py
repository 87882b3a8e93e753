"""What follows from the present state, in the order of the walk.

| derivation  | consumes                       | waits for                                          |
|-------------|--------------------------------|----------------------------------------------------|
| `commit`    | a step that was made           | every policy that has a share of it                |
| `take_turns`| devices that both sides share  | the sleep of the others, in a colocated run        |
| `evaluate`  | held-out prompts               | a version that is due, and rollouts to bind        |
| `publish`   | a version that rollouts need   | the step that makes it                             |
| `catch_up`  | a policy that is behind        | another policy's weights, or the journal           |
| `adopt`     | a publication                  | a rollout that needs it, a replica that offers it  |
| `admit`     | prompts                        | a slot, freed when a step publishes                |
| `dispatch`  | waiting groups                 | a rollout with a slot whose version is new enough  |
| `score`     | generated groups               | a reward replica with a slot                       |
| `teach`     | generated groups               | a teacher with a slot, in a run that has teachers   |
| `train`     | scored groups, oldest first    | all groups of the step, and the order to publish;  |
|             |                                | or, where nothing is trained, the file before      |
| `end`       | the last step                  | evaluation, checkpoint, every replica's farewell   |

Each is idempotent: called twice without an event in between, it does nothing the second time. Which of them an event
makes due is said by its handler; to leave one out would be healed by the next tick, which makes all due.
"""

from __future__ import annotations

import msgspec

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.evaluation.schedule import evaluate
from starling.controller.core.groups.group import Group, Groups, GroupState
from starling.controller.core.groups.partial import NOTHING, PartialCompletions
from starling.controller.core.lifecycle.ending import end, save
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.plan import draw_seed
from starling.controller.core.records import GroupsOpened
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.switching import take_turns
from starling.controller.core.state import ControllerState
from starling.controller.core.training.dispatch import commit, train
from starling.controller.core.weights.distribution import adopt, catch_up, publish


def advance(state: ControllerState) -> None:
    """Derive everything that is due."""
    if state.is_awaiting() and state.ending.stage is RunStage.RUNNING:
        return  # what is not known to be in anybody's hands may be so all the same
    while state.due:
        due, state.due = state.due, Dirty.NOTHING
        if state.ending.stage in (RunStage.RUNNING, RunStage.CHECKPOINTING):
            _walk(state, due)
        if due & Dirty.END:
            end(state)


def _walk(state: ControllerState, due: int) -> None:
    if due & Dirty.TRAIN:
        commit(state)
    if state.turns.shared:
        take_turns(state)
    if due & (Dirty.EVALUATE | Dirty.BIND):
        evaluate(state, everybody=bool(due & Dirty.BIND))
    if due & Dirty.PUBLISH:
        publish(state)
    if due & Dirty.CATCH_UP:
        catch_up(state)
    if state.ending.stage is not RunStage.RUNNING:
        return
    if due & Dirty.ADOPT:
        adopt(state)
    if due & Dirty.ADMIT:
        admit(state)
    if due & Dirty.DISPATCH:
        dispatch(state)
    if due & Dirty.SCORE:
        score(state)
        teach(state)
    if due & Dirty.TRAIN:
        save(state)
        train(state)


def admit(state: ControllerState) -> None:
    """Turn prompts into groups while there are slots."""
    num, first = state.ledger.free_slots(), state.ledger.num_admitted
    if num == 0 or state.ending.stopping:
        return
    state.write(GroupsOpened(first=first, num=num))
    for _ in range(num):
        prompt = state.prompts.prompt(state.ledger.num_admitted)
        state.ledger.admit(prompt, state.expected_tokens(prompt, "train", state.plan.group_size))
    state.due |= Dirty.DISPATCH


def dispatch(state: ControllerState) -> None:
    """Give waiting groups to the rollouts that will finish them first; those of an evaluation go first.

    Of groups that need the same version, the longest of a step goes first, so that its step does not wait for it in the
    end. When a group is dealt never changes the step that trains it.
    """
    evaluation = state.evaluation
    while evaluation is not None and (group := evaluation.next_longest()) is not None:
        state.up_to_date()
        found = evaluation.free.soonest(evaluation.version, group.expected_tokens)
        if found is None:
            break
        _generate(state, found.member, evaluation, group, evaluation.version)
    if not _may_generate(state):
        return
    ledger = state.ledger
    while (group := ledger.next_waiting()) is not None:
        required = state.required_version(group)
        longest = ledger.next_longest()
        if longest is not None and longest is not group and state.required_version(longest) == required:
            group = longest
        tokens = group.expected_tokens
        routing = state.up_to_date().routing
        found = routing.soonest(required, tokens)
        if found is None or routing.should_wait(found, required, tokens, ledger.waiting_tokens):
            return  # the groups behind it need at least as new a version
        _generate(state, found.member, ledger, group, required)


def score(state: ControllerState) -> None:
    """Give generated groups to reward replicas, those of an evaluation first."""
    books: tuple[Groups, ...] = (state.ledger,) if state.evaluation is None else (state.evaluation, state.ledger)
    for book in books:
        while (group := book.next_to_score()) is not None:
            member = state.up_to_date().rewards.least_busy()
            if member is None:
                return
            _score(state, member, group)


def teach(state: ControllerState) -> None:
    """Give generated groups to teachers, whether they are scored yet or not."""
    while (group := state.ledger.next_to_teach()) is not None:
        member = state.up_to_date().teachers.least_busy()
        if member is None:
            return
        _teach(state, member, group)


def _may_generate(state: ControllerState) -> bool:
    """Say whether training groups may be generated: all first replicas are there, and nobody wants to stop."""
    if state.ending.stopping or state.rounds.version < 0:
        return False
    if not state.has_generated:
        members, plan = state.membership, state.plan
        wanted: dict[Role, int] = {
            "rollout": plan.num_rollouts, "reward": plan.num_rewards, "teacher": plan.num_teachers
        }  # fmt: skip
        state.has_generated = all(members.num(role) >= num for role, num in wanted.items())
    return state.has_generated


def _generate(state: ControllerState, member: Member, book: Groups, group: Group, min_version: int) -> None:
    seed = draw_seed(state.plan.seed, group.purpose, group.ordinal, group.tries)
    sampling = msgspec.structs.replace(state.sampling(group.purpose), seed=seed)
    partial = _drop_if_stale(state, group, min_version) or NOTHING
    if partial is not NOTHING:  # all of a group is trained at one temperature
        sampling = msgspec.structs.replace(sampling, temperature=group.temperature)
    group.temperature = sampling.temperature
    book.lease(group, min_version)
    state.grant(
        member,
        "generate",
        group.key,
        lambda lease: wire.GenerateGroup(
            lease=lease,
            purpose=group.purpose,
            prompt=group.prompt,
            num_completions=state.num_completions(group.purpose),
            sampling=sampling,
            min_version=min_version,
            partial=partial.completions,
            tensors=partial.tensors,
        ),
        partial.buffers,
        max(1, group.expected_tokens - partial.num_tokens),
    )


def _drop_if_stale(state: ControllerState, group: Group, min_version: int) -> PartialCompletions | None:
    """Return what there is of a group that is about to be generated; what is too old for its step by now goes."""
    if group.partial is not None and not group.partial.is_within(min_version, state.newest_allowed(group)):
        state.note("stale", prompt=group.prompt.id, num_tokens=group.partial.num_tokens)
        group.partial = None
    return group.partial


def _score(state: ControllerState, member: Member, group: Group) -> None:
    assert group.state is GroupState.GENERATED
    completions = tuple(
        wire.CompletionText(text=t.text, status=t.status, num_tokens=t.num_tokens - t.num_masked, reward=t.reward)
        for t in group.trajectories
    )
    group.scoring = state.grant(
        member,
        "score",
        group.key,
        lambda lease: wire.ScoreGroup(lease=lease, prompt=group.prompt, completions=completions),
    )


def _teach(state: ControllerState, member: Member, group: Group) -> None:
    assert group.state is GroupState.GENERATED
    group.teaching = state.grant(
        member,
        "teach",
        group.key,
        lambda lease: wire.ScoreTokens(
            lease=lease,
            prompt_id=group.prompt.id,
            lengths=tuple(t.num_tokens for t in group.trajectories),
            temperature=group.temperature,
            tensors=group.tensors[:2],
        ),
        group.buffers[:2],
    )
