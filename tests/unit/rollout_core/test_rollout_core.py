"""The rollout's state machine: every transition, and its invariants under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property_tests import examples

from starling.common.wire.messages import AdoptWeights, GenerateGroup, Prompt, PublishWeights, Sampling, Sleep, Wake
from starling.rollout.core.machine import (
    Action,
    AdoptionMode,
    CancelGroup,
    FailLease,
    FallAsleep,
    PublishVersion,
    PullWeights,
    RolloutMachine,
    StartGroup,
    SwitchWeights,
    WakeUp,
)

BUFFERS = (b"offer", b"plan")


def group(lease: str, min_version: int = 0) -> GenerateGroup:
    return GenerateGroup(
        lease=lease,
        purpose="train",
        prompt=Prompt(id="train/0"),
        num_completions=2,
        sampling=Sampling(max_tokens=4),
        min_version=min_version,
    )


def adopt(version: int, attempt: int = 0) -> AdoptWeights:
    return AdoptWeights(lease=f"adopt:{version}:{attempt}", version=version)


def rollout_at(version: int) -> RolloutMachine:
    """Return a rollout that has adopted `version`."""
    rollout = RolloutMachine()
    rollout.adopt(adopt(version), BUFFERS)
    rollout.pulled(f"adopt:{version}:0", None)
    rollout.switched(f"adopt:{version}:0", proven=True)
    return rollout


def test_first_adoption_starts_waiting_group() -> None:
    rollout = RolloutMachine()
    assert (rollout.adoption, rollout.version) == ("stale", -1)
    assert rollout.generate(group("g")) == [], "without weights nothing is generated"
    assert not rollout.may_generate
    assert rollout.adopt(adopt(0), BUFFERS) == [PullWeights(adopt(0), BUFFERS)]
    assert rollout.adoption == "pulling"
    assert rollout.pulled("adopt:0:0", None) == [SwitchWeights("adopt:0:0")]
    assert rollout.adoption == "staged"
    assert rollout.switched("adopt:0:0", proven=True) == [StartGroup(group("g"))]
    assert (rollout.adoption, rollout.version, rollout.adopting) == ("current", 0, None)
    assert rollout.may_generate
    assert rollout.finished("g") == []
    assert rollout.running == set()


def test_rollout_generates_during_pull() -> None:
    rollout = rollout_at(0)
    assert rollout.generate(group("g")) == [StartGroup(group("g"))]
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.may_generate
    assert rollout.version == 0
    rollout.pulled("adopt:1:0", None)
    assert rollout.may_generate
    rollout.switched("adopt:1:0", proven=True)
    assert rollout.may_generate
    assert rollout.version == 1


@pytest.mark.parametrize("held", [-1, 3])
def test_failed_pull_keeps_weights_in_use(held: int) -> None:
    rollout = RolloutMachine() if held < 0 else rollout_at(held)
    before = rollout.adoption
    rollout.adopt(adopt(4), BUFFERS)
    assert rollout.pulled("adopt:4:0", "the policy is gone") == [FailLease("adopt:4:0", "the policy is gone")]
    assert (rollout.adoption, rollout.version, rollout.adopting) == (before, held, None)
    assert rollout.adopt(adopt(4, 1), BUFFERS) == [PullWeights(adopt(4, 1), BUFFERS)], "the next attempt is accepted"


def test_second_adoption_is_rejected() -> None:
    rollout = rollout_at(0)
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.adopt(adopt(2), BUFFERS) == [FailLease("adopt:2:0", "version 1 is being adopted")]
    assert rollout.pulled("adopt:2:0", None) == [], "the second pull was not started"
    assert rollout.pulled("adopt:1:0", None) == [SwitchWeights("adopt:1:0")]


def test_older_version_is_rejected() -> None:
    rollout = rollout_at(3)
    too_old = [FailLease("adopt:2:0", "version 2 is older than version 3, used before")]
    assert rollout.adopt(adopt(2), BUFFERS) == too_old
    assert rollout.adoption == "current"
    rollout.adopt(adopt(4), BUFFERS)
    rollout.pulled("adopt:4:0", None)
    rollout.switched("adopt:4:0", proven=False)
    assert rollout.adopt(adopt(2), BUFFERS) == too_old, "waiting groups may need version 3"


def test_version_in_use_may_be_adopted_again() -> None:
    rollout = rollout_at(3)
    assert rollout.adopt(adopt(3, 1), BUFFERS) == [PullWeights(adopt(3, 1), BUFFERS)], (
        "the controller may have lost the record of its adoption"
    )


def test_engine_with_other_weights_than_were_published_generates_nothing_and_fails_no_lease() -> None:
    rollout = rollout_at(0)
    rollout.adopt(adopt(1), BUFFERS)
    rollout.pulled("adopt:1:0", None)
    assert rollout.switched("adopt:1:0", proven=False, answered=True) == [], "the answer says what it holds"
    assert (rollout.adoption, rollout.version) == ("torn", -1)
    assert not rollout.may_generate
    rollout.adopt(adopt(1), BUFFERS)  # the same version, from another source
    rollout.pulled("adopt:1:0", None)
    rollout.switched("adopt:1:0", proven=True)
    assert (rollout.adoption, rollout.version) == ("current", 1)


def test_torn_engine_generates_nothing_until_proven_version() -> None:
    rollout = rollout_at(0)
    rollout.generate(group("g"))
    rollout.adopt(adopt(1), BUFFERS)
    rollout.pulled("adopt:1:0", None)
    assert rollout.switched("adopt:1:0", proven=False) == [
        FailLease("adopt:1:0", "after the switch the engine does not hold version 1 bit for bit")
    ]
    assert (rollout.adoption, rollout.version) == ("torn", -1)
    assert not rollout.may_generate
    assert rollout.generate(group("h")) == []

    rollout.adopt(adopt(2), BUFFERS)
    assert rollout.adoption == "torn"
    assert not rollout.may_generate
    rollout.pulled("adopt:2:0", "the policy is gone")
    assert rollout.adoption == "torn"

    rollout.adopt(adopt(2, 1), BUFFERS)
    assert rollout.pulled("adopt:2:1", None) == [SwitchWeights("adopt:2:1")]
    assert rollout.adoption == "torn"
    assert not rollout.may_generate, "a staged version is not in use"
    assert rollout.switched("adopt:2:1", proven=True) == [StartGroup(group("h"))]
    assert rollout.may_generate
    assert rollout.running == {"g", "h"}


def test_group_waits_for_new_enough_weights() -> None:
    rollout = rollout_at(0)
    assert rollout.generate(group("new", min_version=2)) == []
    assert rollout.generate(group("old", min_version=0)) == [StartGroup(group("old", 0))]
    for version in (1, 2):
        rollout.adopt(adopt(version), BUFFERS)
        rollout.pulled(f"adopt:{version}:0", None)
        actions = rollout.switched(f"adopt:{version}:0", proven=True)
        assert actions == ([StartGroup(group("new", 2))] if version == 2 else [])


def test_cancelled_groups_are_removed() -> None:
    rollout = rollout_at(0)
    rollout.generate(group("running"))
    rollout.generate(group("held", min_version=1))
    assert rollout.cancelled(("running", "held", "unknown")) == [CancelGroup("running")]
    assert rollout.running == set()
    rollout.adopt(adopt(1), BUFFERS)
    rollout.pulled("adopt:1:0", None)
    assert rollout.switched("adopt:1:0", proven=True) == [], "the waiting group is cancelled, too"


def test_cancelled_adoption_continues() -> None:
    rollout = rollout_at(0)
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.cancelled(("adopt:1:0",)) == []
    assert rollout.pulled("adopt:1:0", None) == [SwitchWeights("adopt:1:0")]
    rollout.switched("adopt:1:0", proven=True)
    assert rollout.version == 1


def test_second_end_of_pull_changes_nothing() -> None:
    rollout = rollout_at(1)
    assert rollout.pulled("adopt:1:0", None) == []
    assert rollout.pulled("adopt:1:0", "late") == []
    assert rollout.adoption == "current"


def test_switch_without_pull_asserts() -> None:
    with pytest.raises(AssertionError, match="a switch follows a pull"):
        RolloutMachine().switched("adopt:0:0", proven=True)
    rollout = RolloutMachine()
    rollout.adopt(adopt(0), BUFFERS)
    with pytest.raises(AssertionError, match="its own pull"):
        rollout.switched("adopt:1:0", proven=True)


def publish(version: int) -> PublishWeights:
    return PublishWeights(lease=f"publish:{version}:0", version=version)


def test_version_in_use_is_published_during_pull() -> None:
    rollout = rollout_at(3)
    assert rollout.publish(publish(3)) == [PublishVersion(publish(3))]
    rollout.adopt(adopt(4), BUFFERS)
    assert rollout.publish(publish(3)) == [PublishVersion(publish(3))]
    rollout.pulled("adopt:4:0", None)
    refused = "version 4 cannot be published: this rollout holds version 3 and adopts version 4"
    assert rollout.publish(publish(4)) == [FailLease("publish:4:0", refused)], "a staged version is not in use"
    rollout.switched("adopt:4:0", proven=True)
    assert rollout.publish(publish(4)) == [PublishVersion(publish(4))]
    refused = "version 3 cannot be published: this rollout holds version 4"
    assert rollout.publish(publish(3)) == [FailLease("publish:3:0", refused)]


def test_unproven_version_is_not_published() -> None:
    nothing = "version 0 cannot be published: this rollout holds no version that it could prove"
    assert RolloutMachine().publish(publish(0)) == [FailLease("publish:0:0", nothing)]
    rollout = rollout_at(0)
    rollout.adopt(adopt(1), BUFFERS)
    rollout.pulled("adopt:1:0", None)
    rollout.switched("adopt:1:0", proven=False)
    for version in (0, 1):
        (action,) = rollout.publish(publish(version))
        assert isinstance(action, FailLease), "torn"


def test_group_fails_after_waiting_too_long_for_weights() -> None:
    rollout = rollout_at(0)
    rollout.version_timeout_s = 60.0
    rollout.generate(group("running"))
    rollout.generate(group("early", min_version=2))
    assert rollout.tick(100.0) == [], "the wait counts from here"
    rollout.generate(group("late", min_version=2))
    assert rollout.tick(110.0) == []
    (wait,) = rollout.waits(130.0)
    assert wait.what == "an order to adopt version 2 or newer"
    assert (wait.on, wait.since_s, wait.seconds_left) == ("controller", 30.0, 30.0), "the wait of the oldest group"
    assert rollout.tick(159.0) == []
    given_back = "an order to adopt version 2 or newer did not come within 60 s"
    assert rollout.tick(160.0) == [FailLease("early", given_back)]
    assert rollout.tick(170.0) == [FailLease("late", given_back)]
    assert rollout.waits(170.0) == ()
    assert rollout.running == {"running"}, "the group does not wait any longer"


def test_pull_is_reported_as_wait_and_never_times_out_here() -> None:
    rollout = rollout_at(0)
    rollout.pull_timeout_s = 5.0
    message = AdoptWeights(lease="adopt:1:0", version=1, source="rollout-7")
    rollout.adopt(message, BUFFERS)
    assert rollout.tick(10.0) == []
    (wait,) = rollout.waits(12.0)
    assert wait.what == "the weights of version 1"
    assert (wait.on, wait.since_s, wait.seconds_left) == ("rollout-7", 2.0, 3.0)
    assert rollout.tick(10_000.0) == [], "the puller enforces the deadline"
    assert rollout.waits(10_000.0)[0].seconds_left == 0.0
    rollout.pulled("adopt:1:0", "the deadline passed")
    assert rollout.waits(10_000.0) == ()


def test_groups_of_torn_engine_time_out() -> None:
    rollout = rollout_at(0)
    rollout.version_timeout_s = 60.0
    rollout.generate(group("g"))
    rollout.tick(0.0)
    rollout.adopt(adopt(1), BUFFERS)
    rollout.pulled("adopt:1:0", None)
    rollout.switched("adopt:1:0", proven=False)
    assert rollout.tick(100.0) == [], "the time before the loss does not count"
    what = "an order to adopt a version, as this engine is torn"
    assert [(wait.what, wait.since_s, wait.seconds_left) for wait in rollout.waits(130.0)] == [(what, 30.0, 30.0)]
    assert rollout.tick(160.0) == [CancelGroup("g"), FailLease("g", f"{what} did not come within 60 s")]
    assert rollout.running == set()


class Rollouts(RuleBasedStateMachine):
    """Random commands, pulls, tokens, losses and releases, compared with a model of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.rollout = RolloutMachine()
        self.engine: dict[str, GenerateGroup] = {}
        self.proven = -1
        """Version that the engine holds bit for bit; -1 for none."""
        self.asleep = False
        self.pulling: AdoptWeights | None = None
        """The pulled version, until the switch."""
        self.pull_ended = False
        self.staged: str | None = None
        self.leased: dict[str, GenerateGroup] = {}
        self.num_commands = 0
        self.now = 0.0
        self.requested_at: dict[str, float] = {}

    @initialize(mode=st.sampled_from(("keep", "finish")), in_place=st.booleans())
    def start(self, mode: AdoptionMode, in_place: bool) -> None:
        self.rollout = RolloutMachine(mode=mode, in_place=in_place, version_timeout_s=10.0, finish_timeout_s=15.0)

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartGroup(message=message):
                    assert message.lease in self.leased, "a released lease has no result"
                    assert message.lease not in self.engine, "the group is already in the engine"
                    assert message.min_version <= self.proven
                    self.engine[message.lease] = message
                case PullWeights(message=message, in_place=in_place):
                    assert self.pulling is None, "one pull at a time"
                    assert in_place == self.rollout.in_place
                    self.pulling, self.pull_ended = message, False
                    self.proven = -1 if in_place else self.proven
                case SwitchWeights(lease=lease):
                    assert self.staged is None, "one switch for each pull"
                    self.staged = lease
                case CancelGroup(lease=lease):
                    del self.engine[lease]
                case FallAsleep(repeated=repeated):
                    assert repeated == self.asleep
                    self.asleep = True
                    self.hand_over()
                case WakeUp(repeated=repeated):
                    assert repeated != self.asleep
                    self.asleep = False
                    if not repeated:
                        self.carry_out(self.rollout.woken(self.proven))
                case FailLease(lease=lease):
                    if lease.startswith("generate"):
                        assert lease not in self.engine, "the group was removed before"
                        del self.leased[lease]

    def hand_over(self) -> None:
        """Hand the engine's groups over to other rollouts."""
        leases, self.engine = list(self.engine), {}
        for lease in leases:
            del self.leased[lease]
            self.carry_out(self.rollout.finished(lease))

    def lease(self, kind: str) -> str:
        self.num_commands += 1
        return f"{kind}:{self.num_commands}:0"

    @rule(min_version=st.integers(0, 6))
    def request_group(self, min_version: int) -> None:
        message = group(self.lease("generate"), min_version)
        self.leased[message.lease] = message
        self.requested_at[message.lease] = self.now
        self.carry_out(self.rollout.generate(message))

    @rule(version=st.integers(0, 6))
    def request_adoption(self, version: int) -> None:
        self.carry_out(self.rollout.adopt(AdoptWeights(lease=self.lease("adopt"), version=version), BUFFERS))

    @precondition(lambda self: self.pulling is not None and not self.pull_ended)
    @rule(fails=st.booleans())
    def end_pull(self, fails: bool) -> None:
        assert self.pulling is not None
        lease, self.pull_ended = self.pulling.lease, True
        if fails:
            self.pulling = None
        self.carry_out(self.rollout.pulled(lease, "no luck" if fails else None))

    @precondition(lambda self: self.staged is not None)
    @rule(proven=st.booleans())
    def switch_weights(self, proven: bool) -> None:
        assert self.pulling is not None
        assert self.pull_ended
        assert self.staged == self.pulling.lease
        lease, self.proven = self.staged, self.pulling.version if proven else -1
        self.staged = self.pulling = None
        self.carry_out(self.rollout.switched(lease, proven=proven))

    @precondition(lambda self: self.rollout.may_generate and self.engine)
    @rule(data=st.data())
    def finish_group(self, data: st.DataObject) -> None:
        assert self.proven == self.rollout.version >= 0, "a token of weights that were never published"
        assert all(message.min_version <= self.proven for message in self.engine.values()), "too old a token"
        lease = data.draw(st.sampled_from(sorted(self.engine)))
        del self.engine[lease]
        del self.leased[lease]
        self.carry_out(self.rollout.finished(lease))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def cancel_group(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leased)))
        del self.leased[lease]
        self.carry_out(self.rollout.cancelled((lease,)))

    @rule(wakes=st.booleans())
    def sleep_or_wake(self, wakes: bool) -> None:
        lease = self.lease("turn")
        self.carry_out(self.rollout.wake(Wake(lease=lease)) if wakes else self.rollout.sleep(Sleep(lease=lease)))

    @rule()
    def lose_controller(self) -> None:
        actions = self.rollout.fenced()
        assert bool(actions) != self.asleep, "once"
        if actions:
            self.pulling = self.staged = None
        self.carry_out(actions)

    @rule()
    def lose_engine(self) -> None:
        self.pulling = self.staged = None
        self.proven, self.asleep = -1, False
        self.carry_out(self.rollout.lost())
        self.hand_over()
        self.carry_out(self.rollout.replaced(-1))

    @rule(seconds=st.floats(0.0, 12.0))
    def advance_time(self, seconds: float) -> None:
        self.carry_out(self.rollout.tick(self.now))
        self.now += seconds
        before = set(self.leased)
        self.carry_out(self.rollout.tick(self.now))
        for lease in before - set(self.leased):
            assert self.now - self.requested_at[lease] >= 10.0, "a group was returned too early"
        assert all(wait.seconds_left > 0.0 for wait in self.rollout.waits(self.now) if wait.on != "policy")

    @invariant()
    def check_waits_have_deadlines(self) -> None:
        waits = self.rollout.waits(self.now)
        assert all(wait.seconds_left <= 60.0 for wait in waits)
        blocked = self.leased and not (self.rollout.may_generate and self.engine)
        assert waits or not blocked, "the rollout is idle without a reported wait"

    @invariant()
    def check_engine_groups(self) -> None:
        assert self.rollout.running == set(self.engine)
        assert self.rollout.asleep == self.asleep

    @invariant()
    def check_generating(self) -> None:
        assert self.rollout.may_generate == (self.proven >= 0 and not self.asleep and self.rollout.adoption != "torn")
        assert not self.rollout.may_generate or self.rollout.version == self.proven

    @invariant()
    def check_no_group_is_held_back(self) -> None:
        ready = {lease for lease, message in self.leased.items() if message.min_version <= self.proven}
        held_back = self.asleep or self.rollout.adoption == "draining"
        assert held_back or ready <= set(self.engine)


Rollouts.TestCase.settings = examples(120, stateful_step_count=40)
TestRollouts = Rollouts.TestCase
