"""`make bench-check`: the verdict on sampled figures, the commits that are compared, and their environments."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import check_checkouts
import pytest
from check import Compared, NotMeasured, Sample, check, explanation, stated_reasons, table
from check_checkouts import Side, base_commit, changed_files, check_out, is_measured
from check_intervals import MIN_ROUNDS
from check_processes import cpu_of_tree, delay_s, descendants, run_delays

BENCH = Path(check_checkouts.__file__).parent
BEFORE, NOW = Side("before", Path("before")), Side("after", Path("after"))
ROUNDS = {"start": 8, "core": 8}
EACH_SEED = pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.campaign] * (seed > 3)) for seed in range(20)]
)


def sampler(cost: Callable[[Side, str, int], float], noise: float = 0.02, seed: int = 0) -> Sample:
    """Return a sampler of one figure per bench; `cost` takes side, bench and the number of the call for them."""
    errors, calls = random.Random(seed), dict[tuple[str, str], int]()

    def sample(side: Side, bench: str) -> dict[str, tuple[float, str]]:
        calls[side.name, bench] = calls.get((side.name, bench), -1) + 1
        value = cost(side, bench, calls[side.name, bench]) * errors.lognormvariate(0, noise)
        return {f"{bench}_s": (value, "s")}

    return sample


def regressed(sample: Sample) -> list[str]:
    return [one.figure for one in check(tuple(ROUNDS), BEFORE, NOW, ROUNDS, sample) if one.regressed]


@EACH_SEED
def test_cost_that_grew_by_15_percent_is_named_and_others_are_not(seed: int) -> None:
    grown = sampler(lambda side, bench, _: 1.15 if side is NOW and bench == "core" else 1.0, seed=seed)
    assert regressed(grown) == ["core_s"]


@EACH_SEED
@pytest.mark.parametrize("growth", [0.5, 1.0, 1.05])
def test_growth_within_the_tolerance_and_gains_pass(growth: float, seed: int) -> None:
    assert regressed(sampler(lambda side, *_: growth if side is NOW else 1.0, noise=0.05, seed=seed)) == []


def test_regression_that_the_second_rounds_do_not_confirm_passes() -> None:
    def once(side: Side, bench: str, call: int) -> float:
        return 1.3 if side is NOW and call <= ROUNDS[bench] else 1.0

    assert regressed(sampler(once)) == []
    assert regressed(sampler(lambda side, *_: 1.3 if side is NOW else 1.0)) == ["start_s", "core_s"]


def test_late_check_measures_as_many_rounds_as_an_interval_needs() -> None:
    found = check(("core",), BEFORE, NOW, ROUNDS, sampler(lambda *_: 1.0), lambda: True)
    assert [len(one.now) for one in found] == [MIN_ROUNDS]


def test_slow_first_round_is_not_counted() -> None:
    found = check(("core",), BEFORE, NOW, ROUNDS, sampler(lambda side, _, call: 50.0 if call == 0 else 1.0, noise=0))
    assert [(one.before, one.now) for one in found] == [([1.0] * 8, [1.0] * 8)]


def test_bench_that_fails_before_the_change_is_left_out_and_one_that_fails_after_it_is_an_error() -> None:
    def failing(*failed: Side) -> Sample:
        works = sampler(lambda *_: 1.0)

        def sample(side: Side, bench: str) -> dict[str, tuple[float, str]]:
            if side in failed and bench == "core":
                raise NotMeasured(side, bench, "no such module")
            return works(side, bench)

        return sample

    assert [one.figure for one in check(tuple(ROUNDS), BEFORE, NOW, ROUNDS, failing(BEFORE))] == ["start_s"]
    for failed in ((NOW,), (BEFORE, NOW)):
        with pytest.raises(NotMeasured, match="core failed after the change:\nno such module"):
            check(tuple(ROUNDS), BEFORE, NOW, ROUNDS, failing(*failed))


def test_reason_that_a_commit_states_is_shown_for_its_figure_only() -> None:
    reasons = stated_reasons("step_s the journal is durable\n\nfirst_step_s\nstep_cpu_s  checks\n")
    assert reasons == {"step_s": "the journal is durable", "step_cpu_s": "checks"}
    slower, other = (Compared("loop", name, "s", [1.0] * 8, [1.5] * 8) for name in ("step_s", "first_step_s"))
    assert explanation(slower, reasons).endswith("A commit of the change says why: the journal is durable")
    assert explanation(other, reasons).endswith("end a commit's message with `Slower: first_step_s <why>`.")


def test_table_names_figure_goal_both_sides_and_the_ratio_with_its_interval() -> None:
    grown = Compared("loop", "first_step_s", "s", [5.0] * 6, [6.0] * 6)
    lines = table([grown, Compared("core", "event_cpu_us", "CPU us", [30.0] * 6, [20.0] * 6)]).splitlines()
    head, row, other = ([cell.strip() for cell in re.split("  +", line)] for line in lines)
    assert head == ["bench", "figure", "goal", "before", "now", "now/before", "95 % interval", "tolerated", "verdict"]
    assert row == ["loop", "first_step_s", "3.5 s", "5 s", "6 s", "1.200", "1.200 to 1.200", "1.10", "REGRESSED"]
    assert other[-5:] == ["20 CPU us", "0.667", "0.667 to 0.667", "1.07", "faster"]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.10] * 6, "REGRESSED"),
        ([1.02, 1.03, 0.97, 1.0, 1.14, 1.01], "ok"),
        ([0.9, 1.2, 1.1, 0.8, 1.0, 1.3], "unclear"),
        ([0.95] * 6, "ok"),
        ([0.90] * 6, "faster"),
    ],
)
def test_verdict_is_unclear_where_the_interval_includes_the_growth_to_be_found(
    ratios: list[float], verdict: str
) -> None:
    assert Compared("loop", "step_s", "s", [1.0] * 6, ratios).verdict == verdict


def test_terminated_check_ends_its_sample_which_ends_what_it_has_started(tmp_path: Path) -> None:
    fifo, ended = tmp_path / "fifo", tmp_path / "ended"
    os.mkfifo(fifo)
    sample = f"""
import signal, sys
sys.path.insert(0, {str(BENCH)!r})
from check_samples import end
signal.signal(signal.SIGTERM, end)
try:
    open({str(fifo)!r}, "w").close()
    signal.pause()
finally:
    open({str(ended)!r}, "w").close()
"""
    driver = f"""
import signal, sys
from pathlib import Path
sys.path.insert(0, {str(BENCH)!r})
from check import Side, end, run_sample
signal.signal(signal.SIGTERM, end)
folder = Path({str(tmp_path)!r})
run_sample(folder, Side("after", folder), "loop")
"""
    (tmp_path / "check_samples.py").write_text(sample)
    interpreter = tmp_path / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(sys.executable)
    with subprocess.Popen([sys.executable, "-c", driver]) as process:
        fifo.read_text()  # the sample runs
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert ended.exists()


# --- what is compared ------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, file: str, text: str) -> str:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", file)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the scripts and one commit."""
    folder = tmp_path / "repository"
    shutil.copytree(BENCH, folder / "bench", ignore=shutil.ignore_patterns(".cache", "__pycache__"))
    git(folder, "init", "-q")
    commit(folder, "libs/one/pyproject.toml", '[project]\nname = "one"\nscripts = {greet = "greeting:main"}\n')
    monkeypatch.setattr(check_checkouts, "ROOT", folder)
    return folder


def test_base_is_the_last_commit_in_common_with_the_main_branch(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    git(repository, "switch", "-q", "-c", "topic")
    commit(repository, "libs/one/a.py", "")
    second = commit(repository, "libs/one/b.py", "")
    assert base_commit(None) == first
    assert base_commit(second[:10]) == second
    assert base_commit("nothing") is None
    git(repository, "switch", "-q", "main")
    commit(repository, "libs/one/c.py", "")
    git(repository, "switch", "-q", "topic")
    assert base_commit(None) == first


def test_base_on_the_main_branch_is_the_parent_or_the_commit_that_files_differ_from(repository: Path) -> None:
    assert base_commit(None) is None, "there is one commit"
    first = git(repository, "rev-parse", "HEAD")
    second = commit(repository, "libs/one/a.py", "")
    assert base_commit(None) == first
    (repository / "libs/one/a.py").write_text("pass\n")
    (repository / "libs/one/new.py").write_text("")
    assert base_commit(None) == second
    assert sorted(changed_files(second)) == ["libs/one/a.py", "libs/one/new.py"]


@pytest.mark.parametrize("depth", ["alone", "shallow", "archive"])
def test_checkout_without_history_passes_and_says_so(repository: Path, depth: str, tmp_path: Path) -> None:
    folder = repository
    if depth == "shallow":
        commit(repository, "libs/one/a.py", "")
        folder = tmp_path / "shallow"
        git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(folder))
    if depth == "archive":
        shutil.rmtree(repository / ".git")
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "bench/check.py"], cwd=folder, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "has no parent commit to compare with" in done.stdout


def test_change_of_other_files_is_not_measured(repository: Path) -> None:
    commit(repository, "docs/page.md", "text")
    done = subprocess.run([sys.executable, "bench/check.py"], cwd=repository, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no file that the quick benches run differs" in done.stdout
    assert is_measured("services/policy/starling/policy/train/rl.py")
    assert is_measured("bench/check_samples.py")
    assert not is_measured("services/policy/README.md")
    assert not is_measured("tests/unit/test_docs.py")


def test_each_side_imports_its_own_members_and_runs_their_commands(repository: Path, tmp_path: Path) -> None:
    source = "import hypothesis\n\ndef main() -> None:\n    print({0!r}, bool(hypothesis))\n"
    base = commit(repository, "libs/one/greeting.py", source.format("before"))
    (repository / "libs/one/greeting.py").write_text(source.format("now"))
    (repository / "libs/one/new.py").write_text("")
    old = check_out(base, tmp_path / "before", "before")
    new = check_out(None, tmp_path / "after", "after")
    (repository / "libs/one/greeting.py").write_text("raise SystemExit('the working tree')\n")
    for side, word in ((old, "before"), (new, "now")):
        command = [str(side.folder / ".venv" / "bin" / "greet")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        assert printed == f"{word} True\n"
    assert (new.folder / "libs/one/new.py").exists()
    assert not (old.folder / "libs/one/new.py").exists()


def test_processor_time_of_a_tree_counts_children_and_grandchildren() -> None:
    """Each of the three processes takes 0.1 s or more before it says so; one of them has ended by then."""
    burn = "import os, time, subprocess, sys\nwhile time.process_time() < 0.1: pass\n"
    ended = f"{burn}"
    waiting = f"{burn}subprocess.run([sys.executable, '-c', {ended!r}])\nprint(flush=True)\nsys.stdin.read()\n"
    root = f"{burn}subprocess.run([sys.executable, '-c', {waiting!r}])\n"
    command = [sys.executable, "-c", root]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_of_tree(process.pid) >= 0.28  # the time of ended children is counted in ticks of 10 ms
        process.communicate()


def test_run_delay_of_competing_processes_is_counted_and_that_of_a_waiting_one_is_not() -> None:
    """Three processes share one core, each until all have taken 0.3 s; a fourth waits for its input."""
    core = min(os.sched_getaffinity(0))
    start = f"import os, sys, time\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nsys.stdin.readline()\n"
    burn = f"{start}while time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()\n"
    commands = [[sys.executable, "-c", code] for code in (burn, burn, burn, start)]
    processes = [subprocess.Popen(one, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for one in commands]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        pids = [process.pid for process in processes]
        before = run_delays(pids)
        for process in processes[:3]:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in processes[:3]:
            assert process.stdout is not None
            process.stdout.readline()
        after = run_delays(pids)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    delays = [delay_s({pid: before[pid]}, {pid: after[pid]}) for pid in pids]
    assert sum(delays[:3]) >= 0.3, "two of the three wait while one runs"
    assert delays[3] < sum(delays[:3])
    assert delay_s(before, after) == pytest.approx(sum(delays))


def test_delay_of_a_process_is_that_of_its_most_delayed_thread() -> None:
    before = {1: {1: 0, 2: 5}, 2: {9: 0}}
    after = {1: {1: 2_000_000_000, 2: 1_000_000_005, 3: 9_000_000_000}, 2: {9: 500_000_000}, 3: {4: 1}}
    assert delay_s(before, after) == 2.5


def test_descendants_are_those_of_the_process_alone() -> None:
    assert os.getpid() in descendants(os.getpid())
    assert os.getppid() not in descendants(os.getpid())
