"""Which work of an earlier controller's leases is taken up, and which is to be forgotten."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from transcript import Script, Stream

from starling.common.wire import messages as wire
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry
from starling.sim.replicas.weights import encoded_layout, encoded_offer


def restarted(before: Script, *, shares: bool = False, version: int = 0) -> Script:
    """Return the same run under the controller's second incarnation; all replicas have said hello, and not beaten."""
    script = Script()
    script.plan, script.held_out, script.aliases = before.plan, before.held_out, before.aliases
    past = [JournalEntry(write.record, write.payload) for write in before.journal]
    prompts = Stream("train")
    script.controller = Controller(before.plan, prompts, Stream("sft"), before.held_out, journal=past, incarnation=2)
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
            shares_steps=shares,
        )
        script.hears(name, hello, *((encoded_layout(name),) if hello.has_layout else ()))
    return script


def generating() -> Script:
    """Return a run with t0 and t1 in the only rollout's hands."""
    script = Script(max_staleness=1)
    script.begins()
    return restarted(script)


def scoring() -> Script:
    """Return a run with t0 at the scorer, and t1 and t2 at the rollout."""
    script = Script(max_staleness=1)
    script.begins()
    script.generates("rollout-0", "generate:t0:0")
    return restarted(script)


def training(*, shares: bool = False) -> Script:
    """Return a run whose first step is frozen."""
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    return restarted(script, shares=shares)


def replaying() -> Script:
    """Return a run at version 1 whose policy is at version 0 again."""
    script = Script()
    script.begins()
    script.makes_groups(0, 1)
    script.trains(1)
    script.publishes(1)
    return restarted(script)


def evaluating() -> Script:
    """Return a run whose version 0 is being evaluated."""
    script = Script(evaluate_at_start=True)
    script.begins(slots=4)
    return restarted(script)


@dataclass(frozen=True)
class Claim:
    """What a replica says it holds."""

    why: str
    given: object
    name: str
    leases: tuple[str, ...]
    taken: tuple[str, ...]


CLAIMS = [
    Claim("a group that waits", generating, "rollout-0", ("generate:t0:1.9",), ("generate:t0:1.9",)),
    Claim(
        "more than it has slots for",
        generating,
        "rollout-0",
        tuple(f"generate:t{n}:1.{n}" for n in range(3)),
        ("generate:t0:1.0", "generate:t1:1.1"),
    ),
    Claim("one group twice", generating, "rollout-0", ("generate:t0:1.1", "generate:t0:1.2"), ("generate:t0:1.1",)),
    Claim("a group that nobody opened", generating, "rollout-0", ("generate:t99:1.1",), ()),
    Claim("a lease of a controller yet to come", generating, "rollout-0", ("generate:t0:3.1",), ()),
    Claim("what is no lease", generating, "rollout-0", ("generate:t0", "nonsense", "generate::1.1", "bake:t0:1.1"), ()),
    Claim("the work of another role", generating, "rollout-0", ("score:t0:1.1", "train:1:1.1", "save:0:1.1"), ()),
    Claim("a group that is generated", scoring, "rollout-0", ("generate:t0:1.1",), ()),
    Claim("a group to score", scoring, "reward-0", ("score:t0:1.9",), ("score:t0:1.9",)),
    Claim("completions that were thrown away", scoring, "reward-0", ("score:t0:1.1",), ()),
    Claim("a group that is not generated", scoring, "reward-0", ("score:t1:1.1",), ()),
    Claim("one score twice", scoring, "reward-0", ("score:t0:1.8", "score:t0:1.9"), ("score:t0:1.8",)),
    Claim("a step that is frozen", training, "policy-0", ("train:1:1.1",), ("train:1:1.1",)),
    Claim("a step that is not", training, "policy-0", ("train:2:1.1",), ()),
    Claim(
        "a share of a step, whose other shares nobody knows",
        lambda: training(shares=True),
        "policy-0",
        ("train:1:1.1",),
        (),
    ),
    Claim("a step that it makes again", replaying, "policy-0", ("train:1:1.1",), ("train:1:1.1",)),
    Claim("the offer of the version that it holds", training, "policy-0", ("publish:0:1.1",), ("publish:0:1.1",)),
    Claim("of another", training, "policy-0", ("publish:1:1.1",), ()),
    Claim("a rollout's offer of what it holds", training, "rollout-0", ("publish:0:1.1",), ("publish:0:1.1",)),
    Claim("the newest version, on its way", replaying, "rollout-0", ("adopt:1:1.1",), ("adopt:1:1.1",)),
    Claim("an older one", replaying, "rollout-0", ("adopt:0:1.1",), ()),
    Claim("two of them", replaying, "rollout-0", ("adopt:1:1.1", "adopt:1:1.2"), ("adopt:1:1.1",)),
    Claim("a state that it saves", training, "policy-0", ("save:0:1.1",), ("save:0:1.1",)),
    Claim("the last checkpoint, which is asked for again", training, "policy-0", ("checkpoint:1:1.1",), ()),
    Claim("a group of the evaluation", evaluating, "rollout-0", ("generate:e0:1.1",), ("generate:e0:1.1",)),
    Claim("a group of an evaluation that is none", training, "rollout-0", ("generate:e0:1.1",), ()),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.why for claim in CLAIMS])
def test_reclaimed_leases(claim: Claim) -> None:
    script = claim.given()  # type: ignore[operator]
    version = script.state.replicas.membership.members[claim.name].version
    script.beats(claim.name, *claim.leases, version=version)
    released = [
        lease for send in script.sent if isinstance(send.message, wire.ReleaseLeases) for lease in send.message.leases
    ]
    mine = {lease.id for lease in script.state.replicas.leases.all_of(claim.name)} & set(claim.leases)
    assert (mine, sorted(released)) == (set(claim.taken), sorted(set(claim.leases) - set(claim.taken)))


def test_reclaimed_and_lost_work_is_dispatched_again() -> None:
    script = generating()
    script.beats("rollout-0", "generate:t0:1.1", version=0)
    script.beats("policy-0")
    script.beats("reward-0")
    lines = script.beats("rollout-0", version=0)
    assert [line.split(" <- ")[1].split(":")[1] for line in lines if "generate" in line] == ["t0"], (
        "nobody has the command to send it again, so it is dispatched anew"
    )


def test_result_of_an_unknown_lease_reclaims_it() -> None:
    script = generating()
    assert script.generates("rollout-0", "generate:t0:0") == ["rollout-0 <- release generate:t0:0"]
    assert script.state.buffer.get(0).state == "generated"  # type: ignore[union-attr]


def test_torn_rollout_reclaims_nothing() -> None:
    script = generating()
    assert "rollout-0 <- release generate:t0:0" in script.beats("rollout-0", "generate:t0:0", version=-1)


def test_publication_requested_before_the_crash_is_reclaimed() -> None:
    script = training()
    script.beats("policy-0", "publish:0:1.1", version=0)
    published = wire.WeightsPublished(lease="publish:0:1.1", version=0, publish_s=0.0)
    script.hears("policy-0", published, encoded_offer(0))
    assert script.state.weights.offers["policy-0"].version == 0
