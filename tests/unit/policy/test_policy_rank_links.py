"""Requests to the ranks of a policy: answers in the order of the ranks, and errors on some or on all of them."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from starling.common.errors import ConfigError, RestartError, StarlingError, WeightsError
from starling.common.observe.process import EXIT_FAILED, EXIT_USAGE
from starling.policy.shell import ranks as policy_ranks
from starling.policy.shell.ranks import RankLink, Ranks, RanksDisagreeError
from starling.policy.train.errors import StepBrokenError

NAME = "policy-0"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank does: raise an error of this kind, if it is one of these ranks."""

    fails: tuple[int, ...] = ()
    error: Literal["ConfigError", "StepBrokenError", "WeightsError", "none"] = "ConfigError"
    batch: bytes = b""


def work(rank: int, task: Task) -> bytes:
    """Do a task on a rank."""
    if rank in task.fails:
        kinds = {"ConfigError": ConfigError, "StepBrokenError": StepBrokenError, "WeightsError": WeightsError}
        raise kinds.get(task.error, StarlingError)(f"rank {rank} has failed")
    return b"%d" % rank


def serve(rank: int, link: RankLink) -> None:
    """Do what comes."""
    while (request := link.receive()) is not None:
        number, command = request
        link.answer(number, partial(work, rank, msgspec.msgpack.decode(command, type=Task)))


def ignore(_: int, __: RankLink) -> None:
    """Read nothing."""
    threading.Event().wait()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Return two other ranks."""
    found = Ranks(NAME, 60.0)
    found.start(3, tmp_path, "text", serve)
    yield found
    found.close(lambda: None)


def do(ranks: Ranks, task: Task, *, agree: bool = False) -> tuple[bytes, list[bytes]]:
    """Do a task on all ranks."""
    return ranks.together(task, partial(work, 0, task), agree=agree)


def test_answers_are_in_the_order_of_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for _ in range(3):
        assert do(ranks, Task()) == (b"0", [b"1", b"2"])
    assert [future.result(60.0) for future in ranks.ask(Task())] == [b"1", b"2"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"{NAME}.rank-{rank}.log" for rank in (1, 2)]


def test_error_of_all_ranks_is_raised_as_it_is(ranks: Ranks) -> None:
    for kind in (ConfigError, StepBrokenError, WeightsError):
        with pytest.raises(kind, match="rank 0 has failed") as caught:
            do(ranks, Task(fails=(0, 1, 2), error=kind.__name__), agree=True)  # type: ignore[arg-type]
        assert type(caught.value) is kind
    assert not ranks.is_broken
    assert do(ranks, Task()) == (b"0", [b"1", b"2"])


def test_error_of_another_rank_keeps_its_kind(ranks: Ranks) -> None:
    for kind in (ConfigError, StepBrokenError, WeightsError):
        with pytest.raises(kind, match="rank 2 has failed") as caught:
            do(ranks, Task(fails=(2,), error=kind.__name__))  # type: ignore[arg-type]
        assert type(caught.value) is kind
    assert not ranks.is_broken, "each rank could do it again"


@pytest.mark.parametrize("failed", [0, 1])
def test_step_of_some_ranks_only_breaks_the_replica(ranks: Ranks, failed: int) -> None:
    with pytest.raises(RanksDisagreeError, match=f"rank {failed} of policy-0 failed alone: rank {failed} has failed"):
        do(ranks, Task(fails=(failed,)), agree=True)
    assert ranks.is_broken


def test_failed_operation_of_all_ranks_asks_for_a_restart(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_ranks, "LOSS_S", 0.0)

    def fail() -> None:
        raise RuntimeError("Connection closed by peer\nsome more")

    with pytest.raises(RestartError, match="cannot go on together: Connection closed by peer; it has to start again"):
        ranks.together(Task(), fail)
    assert ranks.is_broken


def test_rank_that_reads_nothing_asks_for_a_restart(tmp_path: Path) -> None:
    """As one that hangs between two steps, whose next batch is larger than the buffer of its pipe."""
    ranks = Ranks(NAME, 0.5)
    ranks.start(2, tmp_path, "text", ignore)
    with pytest.raises(RestartError, match=r"cannot go on together: rank 1 has read nothing for 0\.5 s; it has to"):
        do(ranks, Task(batch=bytes(1 << 24)))
    assert ranks.is_broken
    ranks.close(lambda: pytest.fail("a rank that hangs does not leave"))


@pytest.mark.parametrize(("error", "code"), [("ConfigError", EXIT_USAGE), ("WeightsError", EXIT_FAILED)])
def test_process_that_waits_for_a_failed_rank_ends(
    error: Literal["ConfigError", "WeightsError"], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again, unless the settings are wrong."""
    monkeypatch.setattr(policy_ranks, "AGREE_S", 0.2)

    def wait() -> None:
        ranks = Ranks(NAME, 60.0)
        ranks.start(2, tmp_path, "text", serve)
        ranks.together(Task(fails=(1,), error=error), threading.Event().wait)

    process = multiprocessing.get_context("fork").Process(target=wait)
    process.start()
    process.join(60.0)
    assert process.exitcode == code


def test_policy_of_one_rank_raises_errors_as_they_are() -> None:
    alone = Ranks(NAME, 60.0)
    assert do(alone, Task(), agree=True) == (b"0", [])
    with pytest.raises(ConfigError, match="rank 0 has failed"):
        do(alone, Task(fails=(0,)), agree=True)
    with pytest.raises(ZeroDivisionError):
        alone.together(Task(), lambda: 1 // 0)
    assert not alone.is_broken
    alone.close(lambda: pytest.fail("there is nothing to leave"))
