"""Replacement of the weights in use: every mode, in place, asleep, and after the engine is lost."""

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


def test_loaded_weights_are_current_at_start() -> None:
    rollout = rollout_at(0)
    assert (rollout.adoption, rollout.may_generate) == ("current", True)
    assert rollout.generate(group("g"), (b"partial",)) == [StartGroup(group("g"), (b"partial",))]
    assert rollout.publish(publish(0)) == [PublishVersion(publish(0))]


@pytest.mark.parametrize("mode", ["keep", "recompute", "salt"])
def test_switch_passes_mode_to_engine(mode: AdoptionMode) -> None:
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


def test_finish_mode_drains_before_switch() -> None:
    rollout = draining()
    assert rollout.generate(group("c")) == [], "new groups would prolong the drain"
    assert rollout.finished("a") == []
    assert rollout.finished("b") == [SwitchWeights("adopt:1:0", "recompute")]
    assert rollout.adoption == "staged"
    assert rollout.switched("adopt:1:0", proven=True) == [StartGroup(group("c"))]
    assert (rollout.adoption, rollout.version) == ("current", 1)


def test_cancelled_groups_end_the_drain() -> None:
    rollout = draining()
    cancelled = rollout.cancelled(("a", "b"))
    assert cancelled == [CancelGroup("a"), CancelGroup("b"), SwitchWeights("adopt:1:0", "recompute")]


def test_drain_ends_at_its_timeout() -> None:
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


def test_pull_time_does_not_count_as_draining() -> None:
    rollout = rollout_at(0, mode="finish")
    rollout.generate(group("a"))
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.tick(0.0) == []
    rollout.pulled("adopt:1:0", None)
    assert rollout.tick(50.0) == []
    assert rollout.tick(79.0) == []
    assert rollout.tick(80.0) == [SwitchWeights("adopt:1:0", "recompute")]


def test_finish_mode_switches_at_once_when_idle() -> None:
    rollout = rollout_at(0, mode="finish")
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.pulled("adopt:1:0", None) == [SwitchWeights("adopt:1:0", "recompute")]


def test_torn_engine_does_not_drain() -> None:
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


def test_in_place_pull_pauses_engine() -> None:
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
    assert rollout.publish(publish(0)) == [FailLease("publish:0:0", refused)], "the weights are being overwritten"
    assert rollout.pulled("adopt:1:0", None) == [SwitchWeights("adopt:1:0", "keep")]
    assert not rollout.may_generate
    assert rollout.switched("adopt:1:0", proven=True) == [StartGroup(group("b"))]
    assert rollout.may_generate


def test_failed_in_place_pull_leaves_engine_torn() -> None:
    rollout = rollout_at(0, in_place=True)
    rollout.generate(group("a"))
    rollout.adopt(adopt(1), BUFFERS)
    assert rollout.pulled("adopt:1:0", "the policy is gone") == [FailLease("adopt:1:0", "the policy is gone")]
    assert (rollout.adoption, rollout.version, rollout.may_generate) == ("torn", -1, False)
    assert rollout.adopt(adopt(1, 1), BUFFERS) == [PullWeights(adopt(1, 1), BUFFERS, in_place=True)]
    rollout.pulled("adopt:1:1", None)
    rollout.switched("adopt:1:1", proven=True)
    assert (rollout.adoption, rollout.version, rollout.running) == ("current", 1, {"a"})


def test_in_place_drains_before_pull() -> None:
    rollout = rollout_at(0, mode="finish", in_place=True)
    rollout.generate(group("a"))
    assert rollout.adopt(adopt(1), BUFFERS) == []
    assert (rollout.adoption, rollout.may_generate) == ("draining", True)
    assert rollout.finished("a") == [PullWeights(adopt(1), BUFFERS, in_place=True)]
    assert (rollout.adoption, rollout.may_generate) == ("pulling", False)
    assert rollout.pulled("adopt:1:0", None) == [SwitchWeights("adopt:1:0", "recompute")]


# --- asleep -------------------------------------------------------------------------------------------------------


def test_asleep_rollout_does_nothing() -> None:
    rollout = rollout_at(2)
    rollout.generate(group("a"))
    assert rollout.sleep(Sleep(lease="sleep:1")) == [FallAsleep("sleep:1")]
    rollout.finished("a")  # its group was handed over
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
    assert not rollout.may_generate, "not before the engine has its memory back"
    assert rollout.woken(2) == [StartGroup(group("b"))]
    assert rollout.may_generate
    assert rollout.wake(Wake(lease="wake:2")) == [WakeUp("wake:2", repeated=True)]


@pytest.mark.parametrize("in_place", [False, True])
def test_fenced_rollout_discards_its_pull(in_place: bool) -> None:
    rollout = RolloutMachine(version=2, in_place=in_place)
    rollout.generate(group("a"))
    rollout.adopt(adopt(3), BUFFERS)
    failed = "this rollout fell asleep meanwhile, as the controller did not answer"
    assert rollout.fenced() == [FailLease("adopt:3:0", failed), FallAsleep("")]
    assert (rollout.adoption, rollout.version) == (("torn", -1) if in_place else ("current", 2))
    assert rollout.fenced() == []
    assert rollout.pulled("adopt:3:0", None) == [], "the fenced rollout's adoption is cancelled"
    rollout.finished("a")
    assert rollout.wake(Wake(lease="wake:1")) == [WakeUp("wake:1")]
    rollout.woken(2)
    assert rollout.may_generate == (not in_place)


def test_engine_may_lose_weights_asleep() -> None:
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


def test_torn_engine_wakes_up_torn() -> None:
    rollout = rollout_at(0)
    rollout.adopt(adopt(1), BUFFERS)
    rollout.pulled("adopt:1:0", None)
    rollout.switched("adopt:1:0", proven=False)
    rollout.sleep(Sleep(lease="sleep:1"))
    rollout.wake(Wake(lease="wake:1"))
    assert rollout.woken(1) == []
    assert (rollout.adoption, rollout.version) == ("torn", -1)


def test_sleep_during_adoption_fails() -> None:
    rollout = rollout_at(0)
    rollout.adopt(adopt(1), BUFFERS)
    failed = "version 1 is being adopted: this rollout cannot sleep"
    assert rollout.sleep(Sleep(lease="sleep:1")) == [FailLease("sleep:1", failed)]
    assert rollout.may_generate


# --- lost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [-1, 0])
def test_lost_engine_is_replaced(loaded: int) -> None:
    rollout = rollout_at(0)
    rollout.generate(group("a"))
    assert rollout.lost() == []
    rollout.finished("a")  # its group was handed over
    assert (rollout.adoption, rollout.version, rollout.may_generate) == ("stale", -1, False)
    assert rollout.generate(group("b")) == []
    assert rollout.replaced(loaded) == ([] if loaded < 0 else [StartGroup(group("b"))])
    assert rollout.version == loaded


@pytest.mark.parametrize("mode", ["keep", "finish"])
def test_adoption_fails_when_engine_is_lost(mode: AdoptionMode) -> None:
    rollout = rollout_at(0, mode=mode)
    rollout.generate(group("a"))
    rollout.adopt(adopt(1), BUFFERS)
    if mode == "finish":
        rollout.pulled("adopt:1:0", None)
    assert rollout.lost() == [FailLease("adopt:1:0", "the engine was lost meanwhile")]
    assert rollout.finished("a") == []
    assert rollout.replaced(-1) == []
    assert rollout.pulled("adopt:1:0", None) == [], "the pull was for the lost engine"
    assert rollout.adopt(adopt(1, 1), BUFFERS) == [PullWeights(adopt(1, 1), BUFFERS)]


def test_failed_switch_keeps_weights_in_use() -> None:
    rollout = rollout_at(0)
    rollout.generate(group("held", min_version=0))
    rollout.adopt(adopt(1), BUFFERS)
    rollout.pulled("adopt:1:0", None)
    assert rollout.switch_failed("nothing is staged") == [FailLease("adopt:1:0", "nothing is staged")]
    assert (rollout.adoption, rollout.version) == ("current", 0)
