"""What can be seen from outside of the controller: its journal, what it says, and what is done by it.

| promise                                    | seen at                                              |
|--------------------------------------------|------------------------------------------------------|
| nothing said before its record is on disk  | each command that leaves the controller              |
| nothing finished is done again             | each command, and each record                        |
| nothing is lost, nothing trained twice     | the sealed steps, and what the policies train        |
| a version exists once, bit for bit         | the digest of each policy after each step            |
| no token of who leaves in order is lost    | each group that is begun after it was given back     |
| staleness within the bound                 | each token of each step                              |
| trained as it was drawn                    | the temperature of each group of each step           |
| nothing is trained without its teacher     | what it makes of the very tokens, in each step       |
| each group of a step teaches, if so wanted | the rewards of each, and of each that is set aside    |
| each prompt is answered once, in its place | the files of a run without a policy                  |
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Final

from starling.common.ids import lease_kind, lease_subject
from starling.common.wire import messages as wire
from starling.controller.core import records
from starling.controller.core.events import Command, Event, Received, Send, Write
from starling.controller.core.groups.stored import StoredGroup
from starling.controller.core.plan import RunPlan
from starling.sim.environment.journal import SimulatedJournal
from starling.sim.errors import demand
from starling.sim.replicas.teacher import teacher_logprobs

RESULTS: Final = (wire.GroupGenerated, wire.GroupScored, wire.TokensScored)
"""What becomes of a group, as its replicas say it."""


class Guarantees:
    """Follows one run. What the journal of a dead controller did not keep is forgotten with it."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._digests: dict[int, str] = {}
        self.trained_prompts: dict[int, list[str]] = {}
        """By step, in the order of their positions."""
        self.files: dict[int, tuple[StoredGroup, ...]] = {}
        """By step, what was written to files: a disk outlives the controller."""
        self.num_repeated = 0
        """Steps that were made by one more policy, or made again."""
        self._adopted: dict[tuple[str, int], set[int]] = {}
        self._journal: SimulatedJournal | None = None
        self._forget()

    def begin(self, journal: SimulatedJournal) -> None:
        """A controller begins; it knows what `journal` kept."""
        self._journal = journal
        self._forget()
        for number, record in enumerate(journal.records()):
            self.written(record, number)

    def _forget(self) -> None:
        self.num_opened = 0
        self.committed = 0
        self.sealed: dict[int, tuple[str, ...]] = {}
        self.discarded: set[int] = set()
        self._kept: dict[str, int] = {}
        """Number of the record that says so of `generate:<key>`, `score:<key>` and `train:<step>`."""
        self._results: dict[str, int] = {}
        """By lease, the number of the record of its answer; only those whose lease was not released yet."""
        self._left: dict[str, int] = {}
        """How many tokens there are of each group that was given back."""
        self._rests: dict[str, int] = {}
        """By lease, the number of the record that its command rests on."""
        self._deciding: tuple[str, str] = ("", "")
        """The lease of the answer in hand, and what its record says."""
        self._changes: set[str] = set()
        self._next_ordinal = 0
        self._evaluations: list[records.EvaluationOpened] = []
        self.promised: set[str] = set()
        """Operators' requests for an evaluation to which the controller said yes."""

    def decided(self, event: Event, commands: list[Command]) -> None:
        """The controller took in a result: note by which record it will be kept, before that is written."""
        self._deciding = ("", "")
        if isinstance(event, Received) and isinstance(event.message, RESULTS):
            lease = event.message.lease
            self._deciding = (lease, f"{lease_kind(lease)}:{lease_subject(lease)}")
        for command in commands:
            if isinstance(command, Write) and isinstance(command.record, records.GroupDiscarded):
                self._check_filtered(command.record, event)

    # --- records ---------------------------------------------------------------------------------------------------

    def written(self, record: records.Record, number: int) -> None:
        """A record is written, as the `number`-th from 0."""
        lease, what = self._deciding
        if lease and _what(record) == what:
            self._results[lease], self._deciding = number, ("", "")
        match record:
            case records.GroupsOpened(first=first, num=num):
                demand(first == self.num_opened, f"prompts from {first} on are opened after {self.num_opened}")
                self.num_opened += num
            case records.CompletionsStored(key=key, trajectories=trajectories):
                demand(f"generate:{key}" not in self._kept, f"group {key} was generated twice")
                self._kept[f"generate:{key}"] = number
                self._left.pop(key, None)
                self._check_evaluation(key, trajectories)
            case records.PartialCompletionsStored(key=key, partial=partial):
                num = sum(completion.num_tokens for completion in partial)
                self._left[key] = max(num, self._left.get(key, 0))
            case records.RewardsStored(key=key):
                demand(f"generate:{key}" in self._kept, f"group {key} was scored before it was generated")
                demand(f"score:{key}" not in self._kept, f"group {key} was scored twice")
                self._kept[f"score:{key}"] = number
            case records.TeacherLogprobsStored(key=key):
                demand(f"generate:{key}" in self._kept, f"group {key} was taught before it was generated")
                demand(f"teach:{key}" not in self._kept, f"group {key} was taught twice")
                self._kept[f"teach:{key}"] = number
            case records.GroupRequeued(key=key):
                self._drop(key)
            case records.GroupDiscarded(key=key, filtered=filtered):
                if filtered:  # it is whole, and nothing of it will ever be wanted again
                    for what in ("generate", "score", "teach"):
                        self._kept.setdefault(f"{what}:{key}", number)
                else:
                    self._drop(key)
                if key.startswith("t"):
                    self.discarded.add(int(key[1:]))
            case records.StepFrozen():
                self._seal(record, number)
            case records.StepCommitted(step=step):
                demand(step == self.committed + 1, f"step {step} was committed after step {self.committed}")
                self.committed = step
            case records.VersionPublished(version=version):
                demand(version <= self.committed, f"version {version} was published before it was committed")
            case records.SettingChanged(request=request):
                demand(request not in self._changes, f"{request} was granted twice")
                self._changes.add(request)
            case records.EvaluationOpened():
                self._evaluations.append(record)

    def _drop(self, key: str) -> None:
        self._left.pop(key, None)
        for what in ("generate", "score", "teach"):
            self._kept.pop(f"{what}:{key}", None)

    def _seal(self, record: records.StepFrozen, number: int) -> None:
        plan, expected = self._plan, list[int]()
        while len(expected) < len(record.ordinals):
            if self._next_ordinal not in self.discarded or not plan.has_policy:
                expected.append(self._next_ordinal)
            self._next_ordinal += 1
        wanted = plan.prompts_per_step
        if not plan.has_policy:
            wanted = min(wanted, plan.num_prompts - (record.step - 1) * wanted)
        demand(list(record.ordinals) == expected, f"step {record.step} is of {record.ordinals}, out of order")
        demand(len(expected) == wanted, f"step {record.step} is of {len(expected)} groups")
        demand(record.step not in self.sealed, f"step {record.step} was sealed twice")
        for ordinal in (n for n in expected if n not in self.discarded):
            demand(f"score:t{ordinal}" in self._kept, f"step {record.step} was sealed without the score of t{ordinal}")
            taught = not self._plan.is_taught or f"teach:t{ordinal}" in self._kept
            demand(taught, f"step {record.step} was sealed before a teacher had seen t{ordinal}")
        self.sealed[record.step] = record.prompts
        self._kept[f"train:{record.step}"] = number

    def _check_filtered(self, record: records.GroupDiscarded, event: Event) -> None:
        if not record.filtered:
            return
        demand(self._plan.dynamic_sampling, f"{record.prompt} was set aside, and nobody wanted that")
        assert isinstance(event, Received)
        scored = event.message
        equal = isinstance(scored, wire.GroupScored) and len(set(scored.rewards)) == 1 and None not in scored.rewards
        demand(equal, f"{record.prompt} was set aside, and its rewards differ")

    def _check_evaluation(self, key: str, trajectories: tuple[wire.TrajectoryMeta, ...]) -> None:
        if not key.startswith("e"):
            return
        version = next(e.version for e in reversed(self._evaluations) if e.first <= int(key[1:]))
        found = {v for t in trajectories for v in (t.oldest_version, t.newest_version)}
        demand(found == {version}, f"the evaluation of version {version} holds tokens of {found}")

    # --- what the controller says ----------------------------------------------------------------------------------

    def asked(self, send: Send) -> None:
        """The controller decided to say something; it may have to wait until it is said."""
        match send.message:
            case wire.GenerateGroup(lease=lease) | wire.ScoreGroup(lease=lease) | wire.ScoreTokens(lease=lease):
                what = f"{lease_kind(lease)}:{lease_subject(lease)}"
                demand(what not in self._kept, f"{what} is asked for again, though it was finished")
                if not isinstance(send.message, wire.GenerateGroup):
                    self._rest(lease, f"generate:{lease_subject(lease)}")
                else:
                    num = sum(completion.num_tokens for completion in send.message.partial)
                    left = self._left.get(lease_subject(lease), 0)
                    demand(num >= left, f"{what} is begun from {num} tokens, and {left} were given back")
            case wire.TrainStep(lease=lease, step=step, replayed=replayed, groups=groups):
                if groups:
                    self._rest(lease, f"train:{step}")
                made = step <= self.committed
                demand(replayed == made, f"step {step} is dealt as if it were {'not ' * made}made before")
            case _:
                pass

    def sent(self, send: Send) -> None:
        """A command leaves the controller: all that it rests on must be on disk."""
        match send.message:
            case wire.ScoreGroup(lease=lease) | wire.ScoreTokens(lease=lease):
                self._demand_on_disk(self._rests[lease], lease)
            case wire.TrainStep(lease=lease, step=step, groups=groups) if groups:
                self._demand_on_disk(self._rests[lease], lease)
                known = set(self.sealed.get(step, ()))
                demand(not known or {g.prompt_id for g in groups} <= known, f"step {step} has groups of another")
            case wire.ReleaseLeases(leases=leases):
                for lease in leases:
                    self._rests.pop(lease, None)
                    self._demand_on_disk(self._results.pop(lease, -1), lease)
            case _:
                pass

    def _rest(self, lease: str, what: str) -> None:
        """Note by which record it is known that `what` is done, on which a command rests."""
        demand(what in self._kept, f"{lease} is asked for, and {what} was not written")
        self._rests.setdefault(lease, self._kept[what])

    def _demand_on_disk(self, number: int, lease: str) -> None:
        assert self._journal is not None, "a controller has begun"
        durable = number < self._journal.num_durable
        demand(durable, f"{lease} was sent or released before record {number}, which it rests on, was on disk")

    # --- what is done ----------------------------------------------------------------------------------------------

    def adopted(self, name: str, epoch: int, version: int) -> None:
        """A rollout proved that it holds `version`."""
        self._adopted.setdefault((name, epoch), set()).add(version)

    def has_adopted(self, name: str, epoch: int, version: int) -> bool:
        """Say whether this incarnation ever held `version`, proven."""
        return version in self._adopted.get((name, epoch), ())

    def taken_over(self, version: int, digest: str) -> None:
        """A policy has the weights and the state of another."""
        demand(digest == self._digests.get(version, digest), f"version {version} was taken over, but is another")

    def trained(self, step: int, unordered: list[str], digest: str) -> bool:
        """A policy made a step of these prompts. Returns True when it is the first to do so."""
        known = self._digests.setdefault(step, digest)
        demand(known == digest, f"version {step} was made twice, of different groups or weights")
        if step in self.trained_prompts:
            self.num_repeated += 1
            return False
        plan = self._plan
        prompts = sorted(unordered, key=lambda prompt: int(prompt.rpartition("/")[2]))
        self.trained_prompts[step] = prompts
        if step <= plan.num_supervised_steps:
            first = (step - 1) * plan.examples_per_step
            wanted = [f"sft/{first + i}" for i in range(plan.examples_per_step)]
            demand(prompts == wanted, f"supervised step {step} was of {prompts}")
            return True
        demand(len(prompts) == plan.prompts_per_step, f"step {step} was of {len(prompts)} groups")
        if step in self.sealed:
            demand(prompts == list(self.sealed[step]), f"step {step} was of {prompts}, and not of what was sealed")
        return True

    def stored(self, step: int, groups: tuple[StoredGroup, ...]) -> None:
        """The controller has the groups of a step written to a file."""
        assert self._journal is not None, "a controller has begun"
        durable = self._kept.get(f"train:{step}", self._journal.num_records) < self._journal.num_durable
        demand(durable, f"the file of step {step} was written before it was on disk which groups it has")
        demand(tuple(group.prompt.id for group in groups) == self.sealed[step], f"the file of step {step} has others")
        demand(self.files.setdefault(step, groups) == groups, f"the file of step {step} was written twice, otherwise")
        for group in groups:
            whole = len(group.trajectories) == self._plan.group_size and not group.problem
            demand(whole or bool(group.problem), f"{group.prompt.id} is written without an answer and without a reason")

    def _answered(self, num_steps: int, *, whole: bool) -> None:
        """A run without a policy is over: is every prompt in its place, once?"""
        written = [group.ordinal for step in sorted(self.files) for group in self.files[step]]
        demand(written == list(range(len(written))), f"the files have the prompts {written}")
        demand(num_steps in (len(self.files), len(self.files) - 1), f"{num_steps} files are known of {len(self.files)}")
        if whole:
            demand(len(written) == self._plan.num_prompts, f"{len(written)} of {self._plan.num_prompts} are answered")

    def at_end(self, num_steps: int, *, whole: bool) -> None:
        """The run is over after `num_steps` steps: is everything trained, once, in order?"""
        plan = self._plan
        if not plan.has_policy:
            self._answered(num_steps, whole=whole)
            return
        # A run that was stopped may have missed a step that only a policy knows of which is gone.
        made = [step for step in sorted(self.trained_prompts) if whole or step != num_steps + 1]
        demand(made == list(range(1, num_steps + 1)), f"steps {made} were made, and {num_steps} are known")
        steps = range(plan.num_supervised_steps + 1, num_steps + 1)
        prompts = [prompt for step in steps for prompt in self.trained_prompts[step]]
        numbers = [int(prompt.rpartition("/")[2]) for prompt in prompts]
        kept = [n for n in range(max(numbers, default=-1) + 1) if n not in self.discarded]
        demand(numbers == kept, "prompts were lost, trained twice or out of order")
        if whole:
            late = self.promised - {opened.request for opened in self._evaluations}
            demand(not late, f"operators were promised evaluations that never came: {sorted(late)}")
            demand(num_steps == plan.last_step, f"only {num_steps} of {plan.last_step} steps were made")


def _what(record: records.Record) -> str:
    match record:
        case records.CompletionsStored(key=key):
            return f"generate:{key}"
        case records.RewardsStored(key=key) | records.GroupDiscarded(key=key, filtered=True):
            return f"score:{key}"
        case records.TeacherLogprobsStored(key=key):
            return f"teach:{key}"
        case _:
            return ""


def check_tokens(plan: RunPlan, message: wire.TrainStep, buffers: tuple[bytes, ...]) -> None:
    """Look at every group that a policy is to train: how old its tokens are, how they were drawn, and if taught."""
    for group, (prompt, tokens, logprobs, encoded, *others) in buffers_by_group(message, buffers):
        demand(len(group.trajectories) == plan.group_size, f"{group.prompt_id} is not whole")
        teaches = len({trajectory.reward for trajectory in group.trajectories}) > 1
        demand(teaches or not plan.dynamic_sampling, f"{group.prompt_id} teaches nothing: its rewards are equal")
        temperature = group.temperature or message.temperature
        for drawn_at in set(struct.unpack(f"<{len(logprobs) // 4}f", logprobs)):
            same = math.isclose(drawn_at, temperature, rel_tol=1e-6)
            demand(same, f"{group.prompt_id} was drawn at temperature {drawn_at:g} and is trained at {temperature:g}")
        versions = struct.unpack(f"<{len(encoded) // 4}i", encoded)
        demand(bool(versions), f"{group.prompt_id} has no tokens")
        stale = message.step - 1 - min(versions)
        demand(stale <= plan.max_staleness, f"{group.prompt_id} is {stale} versions stale in step {message.step}")
        demand(max(versions) < message.step, f"{group.prompt_id} was sampled by a version yet to be made")
        taught = [teacher_logprobs(prompt, tokens)] if plan.is_taught else []
        demand(others == taught, f"{group.prompt_id} is trained without what its teacher makes of these tokens")


def buffers_by_group(
    message: wire.TrainStep, buffers: tuple[bytes, ...]
) -> Iterator[tuple[wire.TrainGroup, tuple[bytes, ...]]]:
    """Yield each group of a step with its buffers."""
    begin = 0
    for group in message.groups:
        end = begin + len(group.tensors)
        yield group, buffers[begin:end]
        begin = end
