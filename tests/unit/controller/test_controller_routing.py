"""Routing of groups, compared with a linear scan, and the estimates of lengths and speeds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transcript import Script

from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.routing.earliest_finish import Route, Routing
from starling.controller.core.replicas.routing.estimates import LengthEstimates, RateEstimates, row_of

NAMES = ("rollout-0", "rollout-1", "rollout-2", "rollout-3")

changes = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.integers(0, 3),
        st.integers(0, 4),
        st.integers(0, 1000),
        st.sampled_from((1.0, 2.0, 8.0)),
        st.booleans(),
    )
)


def member_of(name: str) -> Member:
    return Member(name=name, role="rollout", incarnation=1, num_slots=4, heard_at=0.0, version=-1)


@given(changes, st.integers(1, 1000), st.integers(0, 5000))
def test_routing_matches_a_scan(
    changes: list[tuple[str, int, int, int, float, bool]], tokens: int, others: int
) -> None:
    routing, model = Routing(), dict[str, tuple[int, int, int, float]]()
    members = {name: member_of(name) for name in NAMES}
    for name, version, busy, queued, speed, stays in changes:
        members[name].version = version
        routing.put(members[name], busy, 4, queued=queued, speed=speed)
        model[name] = version, busy, queued, speed
        if not stays:
            routing.drop(members[name])
            del model[name]
        for least in range(-1, 4):
            eligible = {name: entry for name, entry in model.items() if entry[0] >= least}
            free = [
                ((queued + tokens) / speed, name) for name, (_, busy, queued, speed) in eligible.items() if busy < 4
            ]
            found = routing.soonest(least, tokens)
            assert (found and (found.seconds, found.member.name)) == min(free, default=None)
            full = [entry for entry in eligible.values() if entry[1] == 4]
            if found is not None and full:
                work, speed = sum(entry[2] for entry in full) + tokens + others, sum(entry[3] for entry in full)
                their_s = work / speed + tokens / max(entry[3] for entry in full)
                assert routing.should_wait(found, least, tokens, tokens + others) == (found.seconds > their_s)
            elif found is not None:
                assert not routing.should_wait(found, least, tokens, tokens), (
                    "no rollout is full, so none is worth waiting for"
                )


def test_only_the_last_groups_wait_for_a_fast_rollout() -> None:
    routing, slow, fast = Routing(), member_of("rollout-0"), member_of("rollout-1")
    routing.put(slow, 0, 4, queued=0, speed=1.0)
    routing.put(fast, 4, 4, queued=400, speed=8.0)
    found = routing.soonest(-1, 100)
    assert found == Route(slow, 100.0)
    assert routing.should_wait(found, -1, 100, 100), "the fast rollout finishes all groups after 75 s"
    assert not routing.should_wait(found, -1, 100, 1000), "and ten groups after 188 s"


def test_length_of_a_prompt_is_known_from_the_epoch_before() -> None:
    lengths = LengthEstimates()
    assert lengths.expected("train/0/7", "train", 64.0) == 64.0
    lengths.note("train/0/7", "train", 30.0)
    lengths.note("train/0/8", "train", 10.0)
    assert lengths.expected("train/1/7", "train", 64.0) == 30.0
    assert lengths.expected("train/1/9", "train", 64.0) == 26.0, (
        "a moving mean in which the newest value has weight 1/5"
    )
    assert lengths.expected("held/1/9", "evaluate", 64.0) == 64.0, "for an unknown prompt"
    assert [row_of(name) for name in ("a/b/0/7", "train0", "a/7")] == ["a/b/7", "train0", "a/7"]


def test_unknown_rate_is_the_median() -> None:
    rates = RateEstimates()
    assert rates.rate("rollout-0") == 1.0
    for number, speed in enumerate((100, 400, 800)):
        rates.note(f"rollout-{number}", 10 * speed, 10.0)
    assert 330 < rates.rate("rollout-9") < 480
    for number in range(3):
        rates.forget(f"rollout-{number}")
    rates.note("rollout-5", 10, 0.0)
    assert rates.rate("rollout-5") == rates.rate("rollout-9"), "a duration of 0 does not change the rate"


@given(st.floats(0.85, 1.15), st.floats(1.0, 1e6))
def test_rate_class_has_hysteresis(factor: float, speed: float) -> None:
    rates = RateEstimates()
    rates.note("rollout-0", round(speed * 1000), 1000.0)
    before = rates.rate("rollout-0")
    for _ in range(30):
        rates.note("rollout-0", round(speed * factor * 1000), 1000.0)
    assert 0.6 < rates.rate("rollout-0") / before < 1.7


def test_longest_of_a_step_goes_first() -> None:
    script = Script(prompts_per_step=3, num_steps=1)
    for ordinal, length in enumerate((5.0, 50.0, 500.0)):
        script.state.replicas.lengths.note(f"train{ordinal}", "train", length)
    assert [line.split()[3] for line in script.start_run() if "generate" in line] == ["train2", "train1"]
    assert [line.split()[3] for line in script.generates("rollout-0", "generate:t1:0") if "generate:t0" in line] == [
        "train0"
    ]
