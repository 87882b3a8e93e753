"""Reclaim of leases that an earlier controller granted: which are accepted, and which are released."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from transcript import Script, Stream

from starling.common.wire import messages as wire
from starling.controller.core.explain import pull_of
from starling.controller.core.groups.group import GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry
from starling.sim.replicas.weights import encoded_layout, encoded_offer


def restarted(before: Script, *, shares: bool = False, version: int = 0) -> Script:
    """Return the run under the controller's second incarnation, after the hellos and before the heartbeats."""
    script = Script()
    script.plan, script.held_out, script.aliases = before.plan, before.held_out, before.aliases
    journaled = [JournalEntry(write.record, write.payload) for write in before.journal]
    prompts = Stream("train")
    script.controller = Controller(
        before.plan, prompts, Stream("sft"), before.held_out, journal=journaled, incarnation=2
    )
    script.state = script.controller.state
    for name, member in sorted(before.state.replicas.membership.members.items()):
        hello = wire.Hello(
            role=member.role,
            host="h",
            pid=1,
            num_slots=member.num_slots,
            version=version if member.role == "policy" else member.version,
            has_layout=member.role in ("policy", "rollout"),
            serves=True,
            peer="h:1" if shares and member.role == "policy" else "",
        )
        script.receive(name, hello, *((encoded_layout(name),) if hello.has_layout else ()))
    return script


def generating() -> Script:
    """Return a run with t0 and t1 leased to the only rollout."""
    script = Script(max_staleness=1)
    script.start_run()
    return restarted(script)


def scoring() -> Script:
    """Return a run with t0 leased to the scorer, and t1 and t2 to the rollout."""
    script = Script(max_staleness=1)
    script.start_run()
    script.generates("rollout-0", "generate:t0:0")
    return restarted(script)


def training(*, shares: bool = False) -> Script:
    """Return a run whose first step is frozen."""
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    return restarted(script, shares=shares)


def replaying() -> Script:
    """Return a run at version 1 whose policy is at version 0 again."""
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    script.trains(1)
    script.publishes(1)
    return restarted(script)


def evaluating() -> Script:
    """Return a run whose version 0 is being evaluated."""
    script = Script(evaluate_at_start=True)
    script.start_run(slots=4)
    return restarted(script)


@dataclass(frozen=True)
class ReclaimCase:
    """Leases in a replica's heartbeat, and those of them that must be accepted."""

    description: str
    setup: object
    name: str
    leases: tuple[str, ...]
    accepted: tuple[str, ...]


RECLAIM_CASES = [
    ReclaimCase("a waiting group", generating, "rollout-0", ("generate:t0:1.9",), ("generate:t0:1.9",)),
    ReclaimCase(
        "more groups than it has slots",
        generating,
        "rollout-0",
        tuple(f"generate:t{n}:1.{n}" for n in range(3)),
        ("generate:t0:1.0", "generate:t1:1.1"),
    ),
    ReclaimCase(
        "one group twice", generating, "rollout-0", ("generate:t0:1.1", "generate:t0:1.2"), ("generate:t0:1.1",)
    ),
    ReclaimCase("a group that was never opened", generating, "rollout-0", ("generate:t99:1.1",), ()),
    ReclaimCase("a lease of a later incarnation", generating, "rollout-0", ("generate:t0:3.1",), ()),
    ReclaimCase(
        "malformed leases", generating, "rollout-0", ("generate:t0", "nonsense", "generate::1.1", "bake:t0:1.1"), ()
    ),
    ReclaimCase("the work of another role", generating, "rollout-0", ("score:t0:1.1", "train:1:1.1", "save:0:1.1"), ()),
    ReclaimCase("a group that is generated", scoring, "rollout-0", ("generate:t0:1.1",), ()),
    ReclaimCase("a group to score", scoring, "reward-0", ("score:t0:1.9",), ("score:t0:1.9",)),
    ReclaimCase("completions that were discarded", scoring, "reward-0", ("score:t0:1.1",), ()),
    ReclaimCase("a group that is not generated", scoring, "reward-0", ("score:t1:1.1",), ()),
    ReclaimCase("one score twice", scoring, "reward-0", ("score:t0:1.8", "score:t0:1.9"), ("score:t0:1.8",)),
    ReclaimCase("a frozen step", training, "policy-0", ("train:1:1.1",), ("train:1:1.1",)),
    ReclaimCase("a step that is not frozen", training, "policy-0", ("train:2:1.1",), ()),
    ReclaimCase(
        "a share of a step, whose other shares are unknown",
        lambda: training(shares=True),
        "policy-0",
        ("train:1:1.1",),
        (),
    ),
    ReclaimCase("a replayed step", replaying, "policy-0", ("train:1:1.1",), ("train:1:1.1",)),
    ReclaimCase("the offer of the version that it holds", training, "policy-0", ("publish:0:1.1",), ("publish:0:1.1",)),
    ReclaimCase("the offer of another version", training, "policy-0", ("publish:1:1.1",), ()),
    ReclaimCase("a rollout's offer of what it holds", training, "rollout-0", ("publish:0:1.1",), ("publish:0:1.1",)),
    ReclaimCase("the adoption of the newest version", replaying, "rollout-0", ("adopt:1:1.1",), ("adopt:1:1.1",)),
    ReclaimCase("the adoption of an older version", replaying, "rollout-0", ("adopt:0:1.1",), ()),
    ReclaimCase("two adoptions", replaying, "rollout-0", ("adopt:1:1.1", "adopt:1:1.2"), ("adopt:1:1.1",)),
    ReclaimCase("a state being saved", training, "policy-0", ("save:0:1.1",), ("save:0:1.1",)),
    ReclaimCase("the last checkpoint, which is requested again", training, "policy-0", ("checkpoint:1:1.1",), ()),
    ReclaimCase("a group of the evaluation", evaluating, "rollout-0", ("generate:e0:1.1",), ("generate:e0:1.1",)),
    ReclaimCase("a group of an evaluation that does not exist", training, "rollout-0", ("generate:e0:1.1",), ()),
]


@pytest.mark.parametrize("case", RECLAIM_CASES, ids=[case.description for case in RECLAIM_CASES])
def test_reclaimed_leases(case: ReclaimCase) -> None:
    script = case.setup()  # type: ignore[operator]
    version = script.state.replicas.membership.members[case.name].version
    script.heartbeats(case.name, *case.leases, version=version)
    released = [
        lease for send in script.sent if isinstance(send.message, wire.ReleaseLeases) for lease in send.message.leases
    ]
    reclaimed = {lease.id for lease in script.state.replicas.leases.all_of(case.name)} & set(case.leases)
    assert (reclaimed, sorted(released)) == (set(case.accepted), sorted(set(case.leases) - set(case.accepted)))


def test_reclaimed_and_lost_work_is_dispatched_again() -> None:
    script = generating()
    script.heartbeats("rollout-0", "generate:t0:1.1", version=0)
    script.heartbeats("policy-0")
    script.heartbeats("reward-0")
    lines = script.heartbeats("rollout-0", version=0)
    assert [line.split(" <- ")[1].split(":")[1] for line in lines if "generate" in line] == ["t0"], (
        "the lost command cannot be sent again, so the group is dispatched under a new lease"
    )


def test_result_of_an_unknown_lease_reclaims_it() -> None:
    script = generating()
    assert script.generates("rollout-0", "generate:t0:0") == ["rollout-0 <- release generate:t0:0"]
    assert script.state.buffer.get(0).state == "generated"  # type: ignore[union-attr]


def test_torn_rollout_reclaims_nothing() -> None:
    script = generating()
    assert "rollout-0 <- release generate:t0:0" in script.heartbeats("rollout-0", "generate:t0:0", version=-1)


def test_publication_requested_before_the_crash_is_reclaimed() -> None:
    script = training()
    script.heartbeats("policy-0", "publish:0:1.1", version=0)
    published = wire.WeightsPublished(lease="publish:0:1.1", version=0, publish_s=0.0)
    script.receive("policy-0", published, encoded_offer(0))
    assert script.state.weights.offers["policy-0"].version == 0


LONG = "9" * 5000
"""More digits than Python converts to a number."""


@pytest.mark.parametrize(
    ("name", "lease"),
    [
        ("rollout-0", f"generate:t0:1.{LONG}"),
        ("rollout-0", f"generate:t0:{LONG}.1"),
        ("rollout-0", f"generate:t{LONG}:1.5"),
        ("rollout-0", "generate:t²:1.5"),
        ("rollout-0", "generate:t0:1.²"),
        ("rollout-0", "adopt::1.5"),
        ("reward-0", f"score:t0:1.{LONG}"),
        ("reward-0", "score:t²:1.5"),
        ("policy-0", f"train:{LONG}:1.5"),
        ("policy-0", "train:²:1.5"),
        ("policy-0", "save:²:1.5"),
        ("policy-0", "save:soon:1.5"),
    ],
)
def test_lease_that_is_no_number_is_released(name: str, lease: str) -> None:
    """A replica may send any text as a lease, in a heartbeat and as the subject of a failure."""
    script = generating()
    version = script.state.replicas.membership.members[name].version
    progress = wire.LeaseProgress(bytes_done=1, bytes_total=2)
    script.heartbeats(name, lease, version=version, progress=progress)
    released = [send.message.leases for send in script.sent if isinstance(send.message, wire.ReleaseLeases)]
    assert released == ([(lease,)] if len(lease) < len(LONG) else []), "no controller grants a lease with such a name"
    failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason="none")
    script.receive(name, failed)
    assert script.state.replicas.leases.get(lease) is None
    assert pull_of(script.state, script.state.replicas.membership.members[name]) is None


@pytest.mark.parametrize("lease", ["generate:t2:1.999", "generate:t2:1.1", "generate:t0:1.3"])
def test_lease_that_the_replica_did_not_lose_is_not_reclaimed(lease: str) -> None:
    """The controller knows the leases of its own incarnation: others are made up, or of another replica."""
    script = Script(max_staleness=1)
    script.start_run()
    assert [group.state for group in script.state.buffer.live()].count(GroupState.WAITING) == 2
    script.joins("rollout-1")
    script.heartbeats("rollout-1", lease)
    released = [send.message.leases for send in script.sent if isinstance(send.message, wire.ReleaseLeases)]
    assert released == [(lease,)]
    assert not script.state.replicas.leases.num("rollout-1", "generate")


@pytest.mark.parametrize("name", ["reward-0", "teacher-0"])
def test_only_replicas_with_weights_reclaim_an_offer(name: str) -> None:
    script = generating()
    script.joins(name, incarnation=3)
    script.heartbeats(name, "publish:-1:1.999", incarnation=3)
    assert not script.state.replicas.leases.has("publish"), "while one is in force, no other rollout is asked to offer"


@pytest.mark.parametrize("lease", ["adopt:1:1.9", "publish:0:1.9"])
def test_lease_that_another_replica_has_is_not_reclaimed(lease: str) -> None:
    """The table of leases has one holder for each id; the departure of a second one would end the controller."""
    script = Script()
    script.start_run("rollout-0", "rollout-1")
    script.generate_and_score(0, 1)
    script.trains(1)
    script.publishes(1)
    script = restarted(script)
    for name in ("rollout-0", "rollout-1"):
        script.heartbeats(name, lease, version=0)
    leases = script.state.replicas.leases
    assert [lease in {one.id for one in leases.all_of(name)} for name in ("rollout-0", "rollout-1")] == [True, False]
    for name in ("rollout-1", "rollout-0"):
        script.leaves(name)
    assert leases.get(lease) is None
