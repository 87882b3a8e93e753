"""How new weights take the place of those in use: every mode, in place, asleep, and when the engine is lost."""

from __future__ import annotations

import pytest
from test_rollout_core import BUFFERS, adopt, group, publish

from starling.common.wire.messages import Sleep, Wake
from starling.rollout.core.machine import (
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


def rollout_at(version: int, *, mode: AdoptionMode = "keep", in_place: bool = False) -> RolloutMachine:
    """Return a rollout that began with `version`."""
    return RolloutMachine(version=version, mode=mode, in_place=in_place, finish_timeout_s=30.0)


def test_a_rollout_that_loaded_its_weights_begins_with_them() -> None:
    rollout = rollout_at(0)
    assert (rollout.adoption, rollout.may_generate) == ("current", True)
    assert rollout.generate(group("g"), (b"partial",)) == [StartGroup(group("g"), (b"partial",))]
    assert rollout.publish(publish(0)) == [PublishVersion(publish(0))]


@pytest.mark.parametrize("mode", ["keep", "recompute", "salt"])
def test_what_becomes_of_the_cache_is_the_engines_affair(mode: AdoptionMode) -> None:
    rollout = rollout_at(0, mode=mode)
    rollout.generate(group("g"))
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.pulled("adopt:1:0", None) == [SwitchWeights("adopt:1:0", mode)]


# --- finish -------------------------------------------------------------------------------------------------------


def draining() -> RolloutMachine:
    """Return a rollout that has pulled version 1 while `a` and `b` run."""
    rollout = rollout_at(0, mode="finish")
    rollout.generate(group("a"))
    rollout.generate(group("b"))
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.pulled("adopt:1:0", None) == []
    assert (rollout.adoption, rollout.version, rollout.may_generate) == ("draining", 0, True)
    return rollout


def test_new_weights_wait_until_nothing_runs() -> None:
    rollout = draining()
    assert rollout.generate(group("c")) == [], "it would make them wait for longer"
    assert rollout.finished("a") == []
    assert rollout.finished("b") == [SwitchWeights("adopt:1:0", "recompute")]
    assert rollout.adoption == "staged"
    assert rollout.switched("adopt:1:0", proven=True) == [StartGroup(group("c"))]
    assert (rollout.adoption, rollout.version) == ("current", 1)


def test_what_is_given_up_does_not_run() -> None:
    rollout = draining()
    cancelled = rollout.cancelled(("a", "b"))
    assert cancelled == [CancelGroup("a"), CancelGroup("b"), SwitchWeights("adopt:1:0", "recompute")]


def test_new_weights_wait_so_long_and_no_longer() -> None:
    rollout = draining()
    assert rollout.tick(100.0) == []
    (wait,) = rollout.waits(110.0)
    assert (wait.what, wait.on) == ("running requests, before version 1 is adopted", "engine")
    assert (wait.since_s, wait.seconds_left) == (10.0, 20.0)
    assert rollout.tick(129.0) == []
    assert rollout.tick(130.0) == [SwitchWeights("adopt:1:0", "recompute")]
    assert rollout.tick(131.0) == [], "once"
    assert rollout.finished("a") == []
    assert rollout.switched("adopt:1:0", proven=True) == []
    assert rollout.running == {"b"}


def test_the_time_of_the_pull_does_not_count_as_draining() -> None:
    rollout = rollout_at(0, mode="finish")
    rollout.generate(group("a"))
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.tick(0.0) == []
    rollout.pulled("adopt:1:0", None)
    assert rollout.tick(50.0) == []
    assert rollout.tick(79.0) == []
    assert rollout.tick(80.0) == [SwitchWeights("adopt:1:0", "recompute")]


def test_nothing_runs_and_nothing_waits() -> None:
    rollout = rollout_at(0, mode="finish")
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.pulled("adopt:1:0", None) == [SwitchWeights("adopt:1:0", "recompute")]


def test_a_torn_engine_finishes_nothing_so_nothing_is_waited_for() -> None:
    rollout = rollout_at(0, mode="finish")
    rollout.generate(group("a"))
    rollout.adopt(adopt(1), BUFFERS)
    rollout.tick(0.0)
    rollout.pulled("adopt:1:0", None)
    rollout.tick(1.0)
    rollout.tick(31.0)
    rollout.switched("adopt:1:0", proven=False)
    rollout.adopt(adopt(2), BUFFERS)
    assert rollout.pulled("adopt:2:0", None) == [SwitchWeights("adopt:2:0", "recompute")]


# --- in place -----------------------------------------------------------------------------------------------------


def test_the_engine_pauses_while_its_weights_are_written() -> None:
    rollout = rollout_at(0, in_place=True)
    rollout.generate(group("a"))
    assert rollout.adopt(adopt(1), BUFFERS) == [PullWeights(adopt(1), BUFFERS, in_place=True)]
    assert not rollout.may_generate
    assert rollout.generate(group("b")) == []
    rollout.tick(0.0)
    assert {wait.what for wait in rollout.waits(1.0)} == {
        "the weights of version 1",
        "the adoption that is under way",
    }
    refused = "version 0 cannot be published: this rollout holds version 0 and adopts version 1"
    assert rollout.publish(publish(0)) == [FailLease("publish:0:0", refused)], "it is being overwritten"
    assert rollout.pulled("adopt:1:0", None) == [SwitchWeights("adopt:1:0", "keep")]
    assert not rollout.may_generate
    assert rollout.switched("adopt:1:0", proven=True) == [StartGroup(group("b"))]
    assert rollout.may_generate


def test_a_pull_in_place_that_fails_leaves_a_torn_engine() -> None:
    rollout = rollout_at(0, in_place=True)
    rollout.generate(group("a"))
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.pulled("adopt:1:0", "the policy is gone") == [FailLease("adopt:1:0", "the policy is gone")]
    assert (rollout.adoption, rollout.version, rollout.may_generate) == ("torn", -1, False)
    assert rollout.adopt(adopt(1, 1), BUFFERS) == [PullWeights(adopt(1, 1), BUFFERS, in_place=True)]
    rollout.pulled("adopt:1:1", None)
    rollout.switched("adopt:1:1", proven=True)
    assert (rollout.adoption, rollout.version, rollout.running) == ("current", 1, {"a"})


def test_in_place_it_drains_before_the_pull() -> None:
    rollout = rollout_at(0, mode="finish", in_place=True)
    rollout.generate(group("a"))
    assert rollout.adopt(adopt(1), BUFFERS) == []
    assert (rollout.adoption, rollout.may_generate) == ("draining", True)
    assert rollout.finished("a") == [PullWeights(adopt(1), BUFFERS, in_place=True)]
    assert (rollout.adoption, rollout.may_generate) == ("pulling", False)
    assert rollout.pulled("adopt:1:0", None) == [SwitchWeights("adopt:1:0", "recompute")]


# --- asleep -------------------------------------------------------------------------------------------------------


def test_asleep_it_does_nothing() -> None:
    rollout = rollout_at(2)
    rollout.generate(group("a"))
    assert rollout.sleep(Sleep(lease="sleep:1")) == [FallAsleep("sleep:1")]
    rollout.finished("a")  # it was handed over
    assert not rollout.may_generate
    assert rollout.generate(group("b")) == []
    failed = "version 3 cannot be adopted asleep: wake this rollout first"
    assert rollout.adopt(adopt(3), BUFFERS) == [FailLease("adopt:3:0", failed)]
    refused = "version 2 cannot be published: this rollout holds version 2 and sleeps"
    assert rollout.publish(publish(2)) == [FailLease("publish:2:0", refused)]
    rollout.tick(0.0)
    assert [wait.what for wait in rollout.waits(1.0)] == ["an order to wake up"]
    assert rollout.sleep(Sleep(lease="sleep:2")) == [FallAsleep("sleep:2", repeated=True)]

    assert rollout.wake(Wake(lease="wake:1")) == [WakeUp("wake:1")]
    assert not rollout.may_generate, "not before the engine has its memory"
    assert rollout.woken(2) == [StartGroup(group("b"))]
    assert rollout.may_generate
    assert rollout.wake(Wake(lease="wake:2")) == [WakeUp("wake:2", repeated=True)]


@pytest.mark.parametrize("in_place", [False, True])
def test_who_falls_asleep_by_itself_gives_up_what_it_pulls(in_place: bool) -> None:
    rollout = RolloutMachine(version=2, in_place=in_place)
    rollout.generate(group("a"))
    rollout.adopt(adopt(3), BUFFERS)
    failed = "this rollout fell asleep meanwhile, as the controller did not answer"
    assert rollout.fenced() == [FailLease("adopt:3:0", failed), FallAsleep("")]
    assert (rollout.adoption, rollout.version) == (("torn", -1) if in_place else ("current", 2))
    assert rollout.fenced() == []
    assert rollout.pulled("adopt:3:0", None) == [], "nobody waits for it any more"
    rollout.finished("a")
    assert rollout.wake(Wake(lease="wake:1")) == [WakeUp("wake:1")]
    rollout.woken(2)
    assert rollout.may_generate == (not in_place)


def test_an_engine_may_forget_its_weights_asleep() -> None:
    rollout = rollout_at(2)
    rollout.sleep(Sleep(lease="sleep:1"))
    rollout.wake(Wake(lease="wake:1"))
    rollout.generate(group("b"))
    assert rollout.woken(-1) == []
    assert (rollout.adoption, rollout.version, rollout.may_generate) == ("stale", -1, False)
    assert rollout.adopt(adopt(1), BUFFERS) == [
        FailLease("adopt:1:0", "version 1 is older than version 2, used before"),
    ]
    rollout.adopt(adopt(2), BUFFERS)
    rollout.pulled("adopt:2:0", None)
    assert rollout.switched("adopt:2:0", proven=True) == [StartGroup(group("b"))]


def test_torn_it_wakes_up_torn() -> None:
    rollout = rollout_at(0)
    rollout.adopt(adopt(1), BUFFERS)
    rollout.pulled("adopt:1:0", None)
    rollout.switched("adopt:1:0", proven=False)
    rollout.sleep(Sleep(lease="sleep:1"))
    rollout.wake(Wake(lease="wake:1"))
    assert rollout.woken(1) == []
    assert (rollout.adoption, rollout.version) == ("torn", -1)


def test_nobody_sleeps_in_the_midst_of_an_adoption() -> None:
    rollout = rollout_at(0)
    rollout.adopt(adopt(1), BUFFERS)
    failed = "version 1 is being adopted: this rollout cannot sleep"
    assert rollout.sleep(Sleep(lease="sleep:1")) == [FailLease("sleep:1", failed)]
    assert rollout.may_generate


# --- lost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [-1, 0])
def test_another_engine_takes_the_place_of_the_lost_one(loaded: int) -> None:
    rollout = rollout_at(0)
    rollout.generate(group("a"))
    assert rollout.lost() == []
    rollout.finished("a")  # it was handed over
    assert (rollout.adoption, rollout.version, rollout.may_generate) == ("stale", -1, False)
    assert rollout.generate(group("b")) == []
    assert rollout.replaced(loaded) == ([] if loaded < 0 else [StartGroup(group("b"))])
    assert rollout.version == loaded


@pytest.mark.parametrize("mode", ["keep", "finish"])
def test_an_adoption_ends_with_its_engine(mode: AdoptionMode) -> None:
    rollout = rollout_at(0, mode=mode)
    rollout.generate(group("a"))
    rollout.adopt(adopt(1), BUFFERS)
    if mode == "finish":
        rollout.pulled("adopt:1:0", None)
    assert rollout.lost() == [FailLease("adopt:1:0", "the engine was lost meanwhile")]
    assert rollout.finished("a") == []
    assert rollout.replaced(-1) == []
    assert rollout.pulled("adopt:1:0", None) == [], "for the engine that is gone"
    assert rollout.adopt(adopt(1, 1), BUFFERS) == [PullWeights(adopt(1, 1), BUFFERS)]


def test_an_engine_with_nothing_to_switch_to_keeps_what_it_has() -> None:
    rollout = rollout_at(0)
    rollout.generate(group("held", min_version=0))
    rollout.adopt(adopt(1), BUFFERS)
    rollout.pulled("adopt:1:0", None)
    assert rollout.switch_failed("nothing is staged") == [FailLease("adopt:1:0", "nothing is staged")]
    assert (rollout.adoption, rollout.version) == ("current", 0)
