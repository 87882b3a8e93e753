"""Guarantees of a run, checked from outside the controller: by its journal, its messages and the steps of the policies.

`invariants.py` checks the controller's internal state instead.

| guarantee                                                     | checked at                                        |
|---------------------------------------------------------------|---------------------------------------------------|
| no command is sent before its record is durable               | each command that leaves the controller           |
| finished work is not repeated                                 | each command and each record                      |
| no prompt is lost or trained twice                            | the frozen steps, and the steps of the policies   |
| each version exists once, bit for bit                         | the digest of each policy after each step         |
| no token of a rollout that leaves gracefully is lost          | each interrupted group when it is dispatched again|
| staleness stays within the bound                              | each token of each step                           |
| tokens are trained at the temperature they were sampled at    | each group of each step                           |
| with teachers, no group is trained without teacher log-probs  | the log-probabilities of each group of each step  |
| with dynamic sampling, every trained group has mixed rewards  | each trained and each filtered group              |
| without a policy, each prompt is answered once, in its place  | the files of trajectories                         |
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Final

from starling.common.ids import lease_kind, lease_subject
from starling.common.wire import messages as wire
from starling.controller.core import records
from starling.controller.core.events import Command, Event, Received, Send, Write
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import StoredGroup
from starling.sim.environment.journal import SimulatedJournal
from starling.sim.errors import require

RESULTS: Final = (wire.GroupGenerated, wire.GroupScored, wire.TokensScored)
"""The answers of replicas that the controller records."""
SAVED_WITHIN: Final = 5
"""Steps after which a state that an operator was promised is there: a save may fail, its answer be lost in a partition
for as long as its lease is, and the policy be lost."""


class Guarantees:
    """Follows one run. What a crashed controller had not committed is forgotten with it.

    Work on a group is named as the leases are, without their numbers: `generate:<key>`, `score:<key>`, `teach:<key>`;
    `train:<step>` stands for the groups of a frozen step.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._digests: dict[int, str] = {}
        self.trained_prompts: dict[int, list[str]] = {}
        """By step, in the order of their positions."""
        self.files: dict[int, tuple[StoredGroup, ...]] = {}
        """By step, the groups that were written to files, which survive the controller."""
        self.num_repeated = 0
        """Steps that another policy computed too, or that were computed again."""
        self._adopted: dict[tuple[str, int], set[int]] = {}
        self._journal: SimulatedJournal | None = None
        self._reset()

    def begin(self, journal: SimulatedJournal) -> None:
        """Start over from the records in `journal`, as a new incarnation of the controller does."""
        self._journal = journal
        self._reset()
        for number, record in enumerate(journal.records()):
            self.on_write(record, number)

    def _reset(self) -> None:
        self.num_opened = 0
        self.committed = 0
        self.frozen: dict[int, tuple[str, ...]] = {}
        """Prompts of each frozen step."""
        self._first_ordinals: dict[int, int] = {}
        self.discarded: set[int] = set()
        self._done: dict[str, int] = {}
        """Number of the record that says that this work is done."""
        self._answer_records: dict[str, int] = {}
        """By lease, the number of the record of its answer, until the lease is released."""
        self._released: dict[int, int] = {}
        """By id of a queued release, the number of the record that must be durable before it is sent."""
        self._num_partial_tokens: dict[str, int] = {}
        """By key, the tokens of each interrupted group."""
        self._prerequisites: dict[str, int] = {}
        """By lease, the number of the record that must be durable before its command is sent."""
        self._current_answer: tuple[str, str] = ("", "")
        """Lease and work of the answer that the controller handles now."""
        self._changes: set[str] = set()
        self._next_ordinal = 0
        self._promised_state = -1
        """The version of which an operator was promised a state that is not written yet; -1 for none."""
        self._evaluations: list[records.EvaluationOpened] = []
        self.granted_evaluations: set[str] = set()
        """Operators' requests for an evaluation that the controller accepted."""

    def on_event(self, event: Event, commands: list[Command]) -> None:
        """Handle the commands of an event, before any of them is carried out."""
        self._current_answer = ("", "")
        if isinstance(event, Received) and isinstance(event.message, RESULTS):
            lease = event.message.lease
            self._current_answer = (lease, f"{lease_kind(lease)}:{lease_subject(lease)}")
        for command in commands:
            if isinstance(command, Write) and isinstance(command.record, records.GroupDiscarded):
                self._check_filtered(command.record, event)

    # --- records ---------------------------------------------------------------------------------------------------

    def on_write(self, record: records.Record, number: int) -> None:
        """Check record `number` (from 0) of the journal."""
        lease, work = self._current_answer
        if lease and _work_of(record) == work:
            self._answer_records[lease], self._current_answer = number, ("", "")
        match record:
            case records.GroupsOpened(first=first, num=num):
                require(first == self.num_opened, f"prompts from {first} on are opened after {self.num_opened}")
                self.num_opened += num
            case records.CompletionsStored(key=key, trajectories=trajectories):
                require(f"generate:{key}" not in self._done, f"group {key} was generated twice")
                self._done[f"generate:{key}"] = number
                self._num_partial_tokens.pop(key, None)
                self._check_evaluation(key, trajectories)
            case records.PartialCompletionsStored(key=key, partial=partial):
                num = sum(completion.num_tokens for completion in partial)
                self._num_partial_tokens[key] = max(num, self._num_partial_tokens.get(key, 0))
            case records.RewardsStored(key=key):
                require(f"generate:{key}" in self._done, f"group {key} was scored before it was generated")
                require(f"score:{key}" not in self._done, f"group {key} was scored twice")
                self._done[f"score:{key}"] = number
            case records.TeacherLogprobsStored(key=key):
                require(f"generate:{key}" in self._done, f"a teacher scored group {key} before it was generated")
                require(f"teach:{key}" not in self._done, f"teachers scored group {key} twice")
                self._done[f"teach:{key}"] = number
            case records.GroupRequeued(key=key):
                self._forget_group(key)
            case records.GroupDiscarded(key=key, filtered=filtered):
                if filtered:  # a filtered group is complete: no work on it may follow
                    for kind in ("generate", "score", "teach"):
                        self._done.setdefault(f"{kind}:{key}", number)
                else:
                    self._forget_group(key)
                if key.startswith("t"):
                    self.discarded.add(int(key[1:]))
            case records.StepFrozen():
                self._on_frozen(record, number)
            case records.StepReopened(step=step):
                require(step in self.frozen and step > self.committed, f"step {step} was reopened, and is not frozen")
                del self.frozen[step], self._done[f"train:{step}"]
                self._next_ordinal = self._first_ordinals[step]
            case records.StepCommitted(step=step):
                require(step == self.committed + 1, f"step {step} was committed after step {self.committed}")
                self.committed = step
            case records.VersionPublished(version=version):
                require(version <= self.committed, f"version {version} was published before it was committed")
            case records.SettingChanged(request=request):
                require(request not in self._changes, f"{request} was granted twice")
                self._changes.add(request)
            case records.EvaluationOpened():
                self._evaluations.append(record)
            case records.CheckpointRequested(version=version):
                self._promised_state = version
            case records.CheckpointWritten(step=step, state=True) if step >= self._promised_state:
                self._promised_state = -1

    def _forget_group(self, key: str) -> None:
        self._num_partial_tokens.pop(key, None)
        for kind in ("generate", "score", "teach"):
            self._done.pop(f"{kind}:{key}", None)

    def _on_frozen(self, record: records.StepFrozen, number: int) -> None:
        plan, expected = self._plan, list[int]()
        while len(expected) < len(record.ordinals):
            if self._next_ordinal not in self.discarded or not plan.kind.trains:
                expected.append(self._next_ordinal)
            self._next_ordinal += 1
        num_expected = plan.prompts_per_step
        if not plan.kind.trains:
            num_expected = min(num_expected, plan.num_prompts - (record.step - 1) * num_expected)
        require(list(record.ordinals) == expected, f"step {record.step} has the groups {record.ordinals}, out of order")
        require(len(expected) == num_expected, f"step {record.step} has {len(expected)} groups")
        require(record.step not in self.frozen, f"step {record.step} was frozen twice")
        for ordinal in (n for n in expected if n not in self.discarded):
            require(f"score:t{ordinal}" in self._done, f"step {record.step} was frozen without the score of t{ordinal}")
            has_logprobs = not self._plan.has_teachers or f"teach:t{ordinal}" in self._done
            require(has_logprobs, f"step {record.step} was frozen without the teacher log-probs of t{ordinal}")
        self.frozen[record.step] = record.prompts
        self._first_ordinals[record.step] = record.ordinals[0] if record.ordinals else self._next_ordinal
        self._done[f"train:{record.step}"] = number

    def _check_filtered(self, record: records.GroupDiscarded, event: Event) -> None:
        if not record.filtered:
            return
        require(self._plan.dynamic_sampling, f"{record.prompt} was filtered without dynamic sampling")
        assert isinstance(event, Received)
        scored = event.message
        equal = isinstance(scored, wire.GroupScored) and len(set(scored.rewards)) == 1 and None not in scored.rewards
        require(equal, f"{record.prompt} was filtered although its rewards differ")

    def _check_evaluation(self, key: str, trajectories: tuple[wire.TrajectoryMeta, ...]) -> None:
        if not key.startswith("e"):
            return
        version = next(e.version for e in reversed(self._evaluations) if e.first <= int(key[1:]))
        versions = {v for t in trajectories for v in (t.oldest_version, t.newest_version)}
        require(versions == {version}, f"the evaluation of version {version} holds tokens of {versions}")

    # --- commands --------------------------------------------------------------------------------------------------

    def on_queued(self, send: Send) -> None:
        """Check a message that the controller decided to send; it may have to wait for a commit."""
        match send.message:
            case wire.GenerateGroup(lease=lease) | wire.ScoreGroup(lease=lease) | wire.ScoreTokens(lease=lease):
                work = f"{lease_kind(lease)}:{lease_subject(lease)}"
                require(work not in self._done, f"{work} is dispatched again, though it was finished")
                if not isinstance(send.message, wire.GenerateGroup):
                    self._set_prerequisite(lease, f"generate:{lease_subject(lease)}")
                else:
                    num = sum(completion.num_tokens for completion in send.message.partial)
                    num_saved = self._num_partial_tokens.get(lease_subject(lease), 0)
                    require(num >= num_saved, f"{work} is resumed from {num} tokens, of {num_saved} that were saved")
            case wire.TrainStep(lease=lease, step=step, replayed=replayed, groups=groups):
                if groups:
                    self._set_prerequisite(lease, f"train:{step}")
                made = step <= self.committed
                require(replayed == made, f"step {step} is dispatched as {'not ' * made}made before")
            case wire.ReleaseLeases(leases=leases):
                # One that was queued before the answer came does not depend on it.
                self._released[id(send)] = max((self._answer_records.get(lease, -1) for lease in leases), default=-1)
            case _:
                pass

    def on_sent(self, send: Send) -> None:
        """Check a message that leaves the controller: the record that it depends on must be durable."""
        match send.message:
            case wire.ScoreGroup(lease=lease) | wire.ScoreTokens(lease=lease):
                self._require_durable(self._prerequisites[lease], lease)
            case wire.TrainStep(lease=lease, step=step, groups=groups) if groups:
                self._require_durable(self._prerequisites[lease], lease)
                prompts = set(self.frozen.get(step, ()))
                require(not prompts or {g.prompt_id for g in groups} <= prompts, f"step {step} has groups of another")
            case wire.ReleaseLeases(leases=leases):
                for lease in leases:
                    self._prerequisites.pop(lease, None)
                    self._answer_records.pop(lease, None)
                self._require_durable(self._released.pop(id(send)), " ".join(leases))
            case _:
                pass

    def _set_prerequisite(self, lease: str, work: str) -> None:
        """Require the record of `work` to be durable before the command of `lease` is sent."""
        require(work in self._done, f"{lease} is dispatched, and {work} was not recorded")
        self._prerequisites.setdefault(lease, self._done[work])

    def _require_durable(self, number: int, lease: str) -> None:
        assert self._journal is not None, "a controller has begun"
        durable = number < self._journal.num_durable
        require(durable, f"{lease} was sent or released before its record {number} was durable")

    # --- replicas --------------------------------------------------------------------------------------------------

    def on_adopted(self, name: str, incarnation: int, version: int) -> None:
        """Record that a rollout proved to hold `version`."""
        self._adopted.setdefault((name, incarnation), set()).add(version)

    def has_adopted(self, name: str, incarnation: int, version: int) -> bool:
        """Return whether this incarnation ever proved to hold `version`."""
        return version in self._adopted.get((name, incarnation), ())

    def on_copied(self, version: int, digest: str) -> None:
        """Check the weights and the state that one policy copied from another."""
        require(digest == self._digests.get(version, digest), f"the copied version {version} is not the original")

    def on_trained(self, step: int, unordered: list[str], digest: str) -> bool:
        """Check a step that a policy made of these prompts. Returns True for the first policy that makes it."""
        known = self._digests.setdefault(step, digest)
        require(known == digest, f"version {step} was made twice, from different groups or weights")
        if step in self.trained_prompts:
            self.num_repeated += 1
            return False
        plan = self._plan
        prompts = sorted(unordered, key=lambda prompt: int(prompt.rpartition("/")[2]))
        self.trained_prompts[step] = prompts
        if step <= plan.num_supervised_steps:
            first = (step - 1) * plan.examples_per_step
            expected = [f"sft/{first + i}" for i in range(plan.examples_per_step)]
            require(prompts == expected, f"supervised step {step} trained {prompts}")
            return True
        require(len(prompts) == plan.prompts_per_step, f"step {step} trained {len(prompts)} groups")
        if step in self.frozen:
            require(prompts == list(self.frozen[step]), f"step {step} trained {prompts}, which were not frozen for it")
        return True

    def on_stored(self, step: int, groups: tuple[StoredGroup, ...]) -> None:
        """Check a file of trajectories that the controller writes."""
        assert self._journal is not None, "a controller has begun"
        durable = self._done.get(f"train:{step}", self._journal.num_records) < self._journal.num_durable
        require(durable, f"the file of step {step} was written before the record of its groups was durable")
        prompts = tuple(group.prompt.id for group in groups)
        require(prompts == self.frozen[step], f"the file of step {step} has the groups of another")
        same = self.files.setdefault(step, groups) == groups
        require(same, f"the file of step {step} was written twice, with different groups")
        for group in groups:
            whole = len(group.trajectories) == self._plan.group_size and not group.problem
            require(whole or bool(group.problem), f"{group.prompt.id} is stored without an answer and without a reason")

    # --- the end ---------------------------------------------------------------------------------------------------

    def at_end(self, num_steps: int, *, whole: bool) -> None:
        """Check a run that ended after `num_steps` steps; `whole`: it was not stopped before its last step."""
        plan = self._plan
        if not plan.kind.trains:
            self._check_files(num_steps, whole=whole)
            return
        # The controller of a run that was stopped may not know of a step that only a lost policy made.
        made = [step for step in sorted(self.trained_prompts) if whole or step != num_steps + 1]
        require(made == list(range(1, num_steps + 1)), f"steps {made} were made, and {num_steps} are known")
        steps = range(plan.num_supervised_steps + 1, num_steps + 1)
        prompts = [prompt for step in steps for prompt in self.trained_prompts[step]]
        numbers = [int(prompt.rpartition("/")[2]) for prompt in prompts]
        expected = [n for n in range(max(numbers, default=-1) + 1) if n not in self.discarded]
        require(numbers == expected, "prompts were lost, trained twice or out of order")
        if whole:
            missing = self.granted_evaluations - {opened.request for opened in self._evaluations}
            require(not missing, f"evaluations were granted to operators and never made: {sorted(missing)}")
            # One of the last versions may be too late: the end of the run does not wait for a state.
            is_kept = not 0 <= self._promised_state < plan.last_step - SAVED_WITHIN
            require(is_kept, f"a state of version {self._promised_state} was promised and never saved")
            require(num_steps == plan.last_step, f"only {num_steps} of {plan.last_step} steps were made")

    def _check_files(self, num_steps: int, *, whole: bool) -> None:
        """Check that the files of a run without a policy hold each prompt once, in its place."""
        written = [group.ordinal for step in sorted(self.files) for group in self.files[step]]
        require(written == list(range(len(written))), f"the files have the prompts {written}")
        num_files = len(self.files)
        require(num_steps in (num_files, num_files - 1), f"{num_steps} of {num_files} files are known")
        if whole:
            require(len(written) == self._plan.num_prompts, f"{len(written)} of {self._plan.num_prompts} are answered")


def _work_of(record: records.Record) -> str:
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
    """Check the groups of a step before a policy trains it: staleness, temperature, rewards, teacher log-probs."""
    for group, (prompt, tokens, logprobs, encoded, *others) in buffers_by_group(message, buffers):
        require(len(group.trajectories) == plan.group_size, f"{group.prompt_id} is not whole")
        mixed = len({trajectory.reward for trajectory in group.trajectories}) > 1
        require(mixed or not plan.dynamic_sampling, f"{group.prompt_id} is trained although its rewards are equal")
        temperature = group.temperature or message.temperature
        for sampled_at in {-one for one in struct.unpack(f"<{len(logprobs) // 4}f", logprobs)}:
            same = math.isclose(sampled_at, temperature, rel_tol=1e-6)
            require(same, f"{group.prompt_id} was sampled at temperature {sampled_at:g}, trained at {temperature:g}")
        versions = struct.unpack(f"<{len(encoded) // 4}i", encoded)
        require(bool(versions), f"{group.prompt_id} has no tokens")
        staleness = message.step - 1 - min(versions)
        within = staleness <= plan.max_staleness
        require(within, f"{group.prompt_id} is {staleness} versions stale in step {message.step}")
        require(max(versions) < message.step, f"{group.prompt_id} was sampled from a version that does not exist yet")
        expected = [teacher_logprobs(prompt, tokens)] if plan.has_teachers else []
        require(others == expected, f"{group.prompt_id} is trained without the teacher log-probs of its tokens")


def right(text: str) -> float:
    """Return the reward of a text, 1 or 0. (Modulo 7: with a power of two, all completions of a prompt would score the
    same.)"""
    return float(zlib.crc32(text.encode()) % 7 % 2)


def teacher_logprobs(prompt: bytes, tokens: bytes) -> bytes:
    """Return the float32 log-probabilities that simulated teachers give to `tokens` (int32) after `prompt`."""
    value = zlib.crc32(tokens, zlib.crc32(prompt)) % 1000 / -100.0
    return struct.pack("<f", value) * (len(tokens) // 4)


def buffers_by_group(
    message: wire.TrainStep, buffers: tuple[bytes, ...]
) -> Iterator[tuple[wire.TrainGroup, tuple[bytes, ...]]]:
    """Yield each group of a step with its buffers."""
    begin = 0
    for group in message.groups:
        end = begin + len(group.tensors)
        yield group, buffers[begin:end]
        begin = end
