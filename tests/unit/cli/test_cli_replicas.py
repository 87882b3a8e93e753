"""Which replicas a supervisor places, and which it ends, when the desired number changes."""

from __future__ import annotations

import pytest

from starling.cli.launch.interface import Ended, Placement
from starling.cli.run.replicas import Replica, missing, unneeded


def replica(number: int, ended: int | None = None, **fields: object) -> Replica:
    """Return a rollout that runs, or that ended with this code."""
    name = f"rollout-{number}"
    one = Replica(Placement(name, "rollout", ()), None if ended is None else Ended(name, ended, "ended"))
    for field, value in fields.items():
        setattr(one, field, value)
    return one


RUNNING = [replica(0), replica(1)]


@pytest.mark.parametrize(
    ("replicas", "members", "num", "placed"),
    [
        (RUNNING, set(), 2, []),
        (RUNNING, set(), 4, ["rollout-2", "rollout-3"]),
        (RUNNING, {"rollout-0", "rollout-1", "rollout-2"}, 4, ["rollout-3"]),  # another machine brought one
        ([replica(0), replica(2)], set(), 3, ["rollout-1"]),
        ([replica(0), replica(1, 1, due=9.0)], set(), 2, []),  # it is started again
        ([replica(0), replica(1, -9, spared=True)], set(), 2, []),  # it was given up
        ([replica(0), replica(1, -9, spared=True)], set(), 3, ["rollout-2"]),
        ([replica(0), replica(1, 0, is_drained=True)], set(), 1, []),
        ([replica(0), replica(1, 0, is_drained=True)], set(), 2, ["rollout-1"]),  # its name is free again
        ([replica(0), replica(1, is_drained=True)], set(), 2, ["rollout-2"]),  # it has not left yet
        ([replica(0), replica(1, 0)], set(), 2, ["rollout-1"]),
        ([], {"policy-0"}, 1, ["rollout-0"]),
    ],
)
def test_missing_replicas_get_the_lowest_free_names(
    replicas: list[Replica], members: set[str], num: int, placed: list[str]
) -> None:
    assert missing(replicas, members, "rollout", num) == placed


@pytest.mark.parametrize(
    ("replicas", "members", "num", "ended"),
    [
        (RUNNING, {"rollout-0", "rollout-1"}, 1, []),  # the controller drains it
        (RUNNING, {"rollout-0"}, 1, ["rollout-1"]),
        (RUNNING, set(), 1, ["rollout-1"]),
        ([*RUNNING, replica(2)], {"rollout-1"}, 1, ["rollout-2", "rollout-0"]),
        ([replica(0), replica(1, 1, due=9.0)], {"rollout-0"}, 1, ["rollout-1"]),
        ([replica(0), replica(1, is_drained=True)], {"rollout-0"}, 1, []),
        (RUNNING, set(), 2, []),
    ],
)
def test_unneeded_replicas_that_no_controller_drains_are_ended(
    replicas: list[Replica], members: set[str], num: int, ended: list[str]
) -> None:
    assert [one.name for one in unneeded(replicas, members, "rollout", num)] == ended
