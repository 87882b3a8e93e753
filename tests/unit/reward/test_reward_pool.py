"""The scorer pool with real processes: failures of scorers, and the end of all processes with the service."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from sandbox_levels import ALL
from scoring import NO_PROMPT, PATIENCE_S, collect, scored, scorers_in, settings_of, task

from starling.common.errors import ConfigError
from starling.common.sandbox.launch import Mechanism, problem_of
from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.samples import PromptText, group_task
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.settings import RewardSettings

MISBEHAVING = Path(__file__).with_name("misbehaving.py")


def settings(*functions: str, **others: Any) -> RewardSettings:
    return settings_of(*scorers_in(MISBEHAVING, *functions, retries=0), **others)


def has_ended(pid: int) -> bool:
    """Wait until the process has ended or is a zombie; return False when it still runs."""
    try:
        life = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(life, select.POLLIN)
    try:
        return bool(poller.poll(PATIENCE_S * 1000))
    finally:
        os.close(life)


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    """One pool for all failures after which the worker continues or is replaced."""
    with ScoringPool(settings("act", num_workers=2, timeout_s=30)) as shared:
        yield shared


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise wrong number", "scorer 'act' raised ValueError: wrong number ({file}:"),
        ("raise", "scorer 'act' raised ValueError ({file}:"),
        ("raise-unsayable", "scorer 'act' raised FailingStr: (its text cannot be had) ({file}:"),
        ("raise-surrogate", "scorer 'act' raised ValueError: ? ({file}:"),
        ("sys-exit bye", "scorer 'act' raised SystemExit: bye ({file}:"),
        ("value nan", "scorer 'act' returned nan."),
        ("value inf", "scorer 'act' returned -inf."),
        ("value none", "scorer 'act' returned a NoneType, not a number."),
        ("value text", "scorer 'act' returned a str, not a number."),
        ("value pair", "scorer 'act' returned a tuple, not a number."),
        ("value decimal", "scorer 'act' returned a Decimal, not a number."),
        ("value huge", "scorer 'act' raised OverflowError: int too large to convert to float."),
        ("exit 3", "scorer 'act' ended its worker process (exit status 3)."),
        ("signal 36", "scorer 'act' ended its worker process (signal 36)."),
        ("segfault", "scorer 'act' ended its worker process (signal SIGSEGV)."),
        ("close-all", "scorer 'act' ended its worker process"),
        ("write-into-line", "scorer 'act' ended its worker process"),
        ("write-deep-into-line", "scorer 'act' ended its worker process"),
    ],
)
def test_failure_is_a_status_of_one_completion(pool: ScoringPool, text: str, problem: str) -> None:
    first, failed, last = scored(pool, task("good", text, "good"))
    assert (first.value, first.status, first.problem) == (1.0, Status.OK, "")
    assert (last.value, last.status, last.problem) == (1.0, Status.OK, "")
    assert (failed.value, failed.status) == (None, Status.REWARD_ERROR)
    assert failed.problem.startswith(problem.replace("{file}", str(Path(__file__).with_name("misbehaving.py"))))


@pytest.mark.parametrize(("text", "value"), [("value true", 1.0), ("value int", 3.0), ("print", 1.0)])
def test_any_number_is_a_score_and_printing_is_harmless(pool: ScoringPool, text: str, value: float) -> None:
    pool.submit(task(text, "good"))
    assert [score.value for score in collect(pool, 2)] == [value, 1.0]


def test_long_problem_is_shortened(pool: ScoringPool) -> None:
    (score,) = scored(pool, task("raise-long"))
    assert "xxx... (" in score.problem
    assert len(score.problem) < 400


def test_forked_child_cannot_report_for_worker(pool: ScoringPool) -> None:
    scores = scored(pool, task("fork", *["good"] * 20))
    assert scores[0].value in (1.0, 7.0)
    assert all(score.value in (1.0, None) for score in scores[1:])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "first"),
    [
        ("time", Status.OK),  # as good as returning it
        ("value", Status.REWARD_ERROR),
        ("problem", Status.REWARD_ERROR),
        ("length", Status.REWARD_ERROR),
    ],
)
def test_report_in_name_of_worker_cannot_stop_the_service(what: str, first: Status) -> None:
    """A time that is no number would be the begin of the worker's next call, which then has no limit."""
    with ScoringPool(settings("act", timeout_s=2)) as pool:
        forged, hanging = scored(pool, task(f"forge {what}", "hang"))
    assert forged.status is first
    assert forged.value is None or math.isfinite(forged.value)
    assert len(forged.problem) < 3000
    assert hanging.status is Status.REWARD_TIMEOUT


def test_failed_start_reported_after_the_start_costs_one_call() -> None:
    """The service would otherwise forget the calls that the worker has, and answer their groups never."""
    with ScoringPool(settings("act", timeout_s=30)) as pool:
        first, failed, last = scored(pool, task("good", "fail-start", "good"))
    assert (first.value, last.value) == (1.0, 1.0)
    assert failed.status is Status.REWARD_ERROR
    assert failed.problem.endswith("sent a message in its worker's name.")


def test_reports_without_end_cannot_stop_the_service(pool: ScoringPool) -> None:
    """A service that reads them until none is left would read for ever."""
    scored(pool, task("good"))
    pool.submit(task("flood", id="score:1:0"))
    time.sleep(0.5)  # so that the worker is ahead
    [score] = collect(pool, 1)
    assert score.problem.endswith("sent a message in its worker's name.")
    pool.submit(task("good", id="score:2:0"))
    assert collect(pool, 1)[0].value == 1.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["hang", "hang-in-c"])
def test_hanging_scorer_is_killed_at_its_limit(text: str) -> None:
    with ScoringPool(settings("act", timeout_s=0.3)) as pool:
        before = pool.worker_pids()
        scores = scored(pool, task("good", text, "good"))
        assert [score.value for score in scores] == [1.0, None, 1.0]
        assert scores[1].status is Status.REWARD_TIMEOUT
        assert scores[1].problem == "scorer 'act' took longer than 0.3 s."
        assert pool.worker_pids() != before
        assert has_ended(before[0])
        assert pool.gauges()["workers_replaced"] == 1


def marked(marker: str) -> list[int]:
    """Return the living processes with `marker` in their command line."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if marker in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("level", ALL)
def test_children_of_killed_scorer_are_killed(level: Mechanism) -> None:
    """Even one that has a session of its own."""
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    marker = f"child-{level}-{os.getpid()}"
    with ScoringPool(settings("act", timeout_s=3, sandbox=level)) as pool:
        pool.submit(task(f"hang-with-child {marker}"))
        seen = list[int]()
        while not (scores := pool.poll(0.1)):
            seen += marked(marker)
        assert scores[0].status is Status.REWARD_TIMEOUT
        assert seen
        deadline = time.monotonic() + PATIENCE_S
        while marked(marker):
            assert time.monotonic() < deadline, "a child of it lives on"
            time.sleep(0.05)


def test_each_scorer_has_its_own_limit_and_loses_only_its_own_score() -> None:
    scorers = [
        {"name": f"{MISBEHAVING}:length", "label": "length"},
        {"name": f"{MISBEHAVING}:act", "label": "act", "timeout_s": 0.2},
    ]
    with ScoringPool(RewardSettings.model_validate({"scorers": scorers, "timeout_s": 60})) as pool:
        scores = scored(pool, task("good", "hang", scorers=(0, 1)))
    assert [score.value for score in scores] == [4.0, 1.0, 4.0, None]
    assert "took longer than 0.2 s" in scores[3].problem


def test_scorers_receive_everything_and_their_options() -> None:
    scorers = [{"name": f"{MISBEHAVING}:everything", "options": {"bonus": 0.5}}]
    with ScoringPool(RewardSettings.model_validate({"scorers": scorers})) as pool:
        prompt = PromptText("p", "r", {"deep": {"list": [1, 2.5, None]}})
        (score,) = scored(pool, task("c", prompt=prompt))
    assert score.value == 1.5, score.problem


def test_scorers_get_completion_fields_they_take() -> None:
    """Completions with equal text are distinguished; a negative weight affects the reward and not the score."""
    scorers = [
        {"name": f"{MISBEHAVING}:all_arguments", "label": "all", "options": {"unit": 2}},
        {"name": "overlong", "weight": -3.0, "options": {"max_tokens": 8, "buffer": 4}},
    ]
    completions = tuple(
        CompletionText(text="same", status=status, num_tokens=count)
        for status, count in ((Status.OK, 4), (Status.OK, 6), (Status.TRUNCATED, 8))
    )
    with ScoringPool(RewardSettings.model_validate({"scorers": scorers})) as pool:
        pool.submit(group_task("score:0:0", enumerate(completions), NO_PROMPT, (0, 1)))
        scores = collect(pool, 6)
    assert [score.value for score in scores] == [2.0, 0.0, 3.0, -0.5, -4.0, -1.0], scores


def test_many_tasks_and_long_texts_all_arrive_once() -> None:
    with ScoringPool(settings("length", "act", num_workers=2)) as pool:
        expected: dict[tuple[str, int, int], float] = {}
        for number in range(60):
            texts = ["y" * (number * 37 + i) for i in range(number % 9)]
            if number == 30:
                texts += ["z" * 3_000_000, "z" * 2_000_000]  # more than a socket takes at once
            pool.submit(task(*texts, id=f"score:{number}:0", scorers=(0, 1)))
            expected |= {(f"score:{number}:0", i, 0): float(len(text)) for i, text in enumerate(texts)}
            expected |= {(f"score:{number}:0", i, 1): 1.0 for i in range(len(texts))}
        scores = collect(pool, len(expected))
        assert {(s.task, s.completion, s.scorer): s.value for s in scores} == expected
        assert len(scores) == len(expected)
        assert pool.gauges()["queue_depth"] == 0


def test_cancelled_task_returns_no_scores_and_frees_its_id() -> None:
    with ScoringPool(settings("act", timeout_s=0.5)) as pool:
        pool.submit(task("hang", "good"))
        pool.cancel("score:0:0")
        pool.cancel("score:unknown:0")
        (score,) = scored(pool, task("value int"))
        assert score.value == 3.0
        assert pool.poll() == []


def test_waits_name_each_busy_worker_and_its_limit() -> None:
    with ScoringPool(settings("act", timeout_s=30.0, start_timeout_s=50.0)) as pool:
        (wait,) = pool.waits()
        assert (wait.what, wait.on) == ("the imports of a worker", f"worker {pool.worker_pids()[0]}")
        assert 0.0 <= wait.since_s <= 50.0
        assert wait.since_s + wait.seconds_left == pytest.approx(50.0)
        scored(pool, task("good"))
        assert pool.waits() == (), "idle workers have no waits"
        pool.submit(task("good", "hang"))
        collect(pool, 1)
        (wait,) = pool.waits()
        assert (wait.what, wait.on) == ("scorer act on completion 1 of score:0:0", f"worker {pool.worker_pids()[0]}")
        assert wait.since_s + wait.seconds_left == pytest.approx(30.0)


def test_task_in_progress_cannot_be_submitted_again() -> None:
    with ScoringPool(settings("act")) as pool:
        pool.submit(task("good"))
        with pytest.raises(ValueError, match="being scored already"):
            pool.submit(task("good"))


def test_killed_idle_worker_is_replaced() -> None:
    with ScoringPool(settings("act")) as pool:
        scored(pool, task("good"))
        (pid,) = pool.worker_pids()
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid)
        (score,) = scored(pool, task("good"))
        assert score.value == 1.0 or "signal SIGKILL" in score.problem
        deadline = time.monotonic() + PATIENCE_S
        while pool.worker_pids() == (pid,):  # what is inside of the killed process ends a moment later
            assert time.monotonic() < deadline
            pool.poll(0.05)


def test_pool_can_be_polled_with_zeromq() -> None:
    with ScoringPool(settings("act", timeout_s=0.3)) as pool:
        poller = zmq.Poller()
        poller.register(pool.fileno(), zmq.POLLIN)
        pool.submit(task("good", "hang", "exit 1", "good"))
        statuses: dict[int, Status] = {}
        for _ in range(1000):
            deadline = pool.next_deadline()
            poller.poll(60_000 if deadline is None else max(0, math.ceil(1000 * (deadline - time.monotonic()))))
            statuses |= {score.completion: score.status for score in pool.poll()}
            if len(statuses) == 4:
                break
        assert statuses == {
            0: Status.OK,
            1: Status.REWARD_TIMEOUT,
            2: Status.REWARD_ERROR,
            3: Status.OK,
        }


def test_workers_import_only_what_their_scorers_need() -> None:
    with ScoringPool(settings("modules")) as pool:
        scores = scored(pool, task("sympy", "math_verify", "reasoning_gym", "torch", "pydantic", "zmq", "msgspec"))
    assert [score.value for score in scores] == [0, 0, 0, 0, 0, 0, 1]


def test_close_leaves_no_process_even_when_scorers_hang() -> None:
    with closing(ScoringPool(settings("act", num_workers=3))) as pool:
        pool.submit(task("good", "hang"))
        collect(pool, 1)
        pids = pool.worker_pids()
        assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_pool_reports_scorers_that_no_longer_import(tmp_path: Path) -> None:
    scorer = tmp_path / "vanishing.py"
    scorer.write_text("def f(c, r, p, m): return 1\n")
    invalid_settings = RewardSettings.model_validate({"scorers": [{"name": f"{scorer}:f"}], "num_workers": 3})
    scorer.unlink()
    with ScoringPool(invalid_settings) as pool, pytest.raises(ConfigError, match=r"can be started.*there is no file"):
        pool.poll(PATIENCE_S)


SERVICE = """
    import sys
    from starling.common.wire.messages import CompletionText
    from starling.reward.core.samples import PromptText, group_task
    from starling.reward.score.pool.pool import ScoringPool
    from starling.reward.settings import RewardSettings

    pool = ScoringPool(RewardSettings(scorers=[{"name": sys.argv[1]}], num_workers=2, timeout_s=600))
    texts = [CompletionText(text=text, status="ok", num_tokens=1) for text in ("good", "hang-in-c", "good")]
    pool.submit(group_task("t", enumerate(texts), PromptText("", "", {}), (0,)))
    scores = []
    while len(scores) < 2:
        scores += pool.poll(60)
    print("pids", *pool.worker_pids(), flush=True)
    sys.stdin.read()
"""


def test_no_worker_outlives_a_killed_service() -> None:
    command = [sys.executable, "-c", textwrap.dedent(SERVICE), f"{MISBEHAVING}:act"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        line = next(line for line in service.stdout if line.startswith("pids "))  # after lines of the log
        pids = [int(pid) for pid in line.split()[1:]]
        service.kill()
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)


def test_service_imports_no_heavy_package() -> None:
    check = (
        "import sys, starling.reward.score.pool.pool, starling.reward.score.pool.check, starling.reward.settings;"
        "heavy = {'torch', 'transformers', 'numpy', 'sympy', 'math_verify', 'reasoning_gym'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
