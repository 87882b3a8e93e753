"""Isolation of scorers: which share workers, Python environments of their own, devices, memory, and liars."""

from __future__ import annotations

import os
import shutil
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scoring import PATIENCE_S, scored, settings_of, task

from starling.common.errors import ConfigError
from starling.common.sandbox.interpreter import find_interpreter
from starling.common.wire.messages import Status
from starling.reward.core.samples import PromptText
from starling.reward.score.pool.check import check_scorers
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.workers.bootstrap import version_of
from starling.reward.score.workers.devices import device_variables
from starling.reward.score.workers.kinds import kinds_of

PROMPT = PromptText("p", "r", {})
SCORERS = """
import os
import sys
import time


def environment(completion, reference, prompt_text, metadata):
    assert sys.prefix == completion, sys.prefix
    assert "PYTHONPATH" not in os.environ
    try:
        import pydantic
    except ImportError:
        return 1.0
    return 0.0


def devices(completion, reference, prompt_text, metadata):
    return float(os.environ["CUDA_VISIBLE_DEVICES"] == completion)


def grows(completion, reference, prompt_text, metadata):
    kept = []
    while True:
        if completion == "private":
            kept.append(bytearray(16 << 20))
        elif completion == "file":
            fd = os.memfd_create("grows")
            kept.append(fd)
            os.write(fd, bytes(16 << 20))
        else:
            with open(f"/dev/shm/{len(kept)}", "wb") as file:
                kept.append(file.write(bytes(16 << 20)))
        time.sleep(0.02)


class Group:
    scope = "groupwise"

    def score(self, batch):
        if "exit" in batch.completions:
            os._exit(3)
        return {"score": [1.0] * len(batch)}
"""
LIAR = """
import socket
import sys

from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.workers.protocol import WorkerReady, frame

socket.socket(fileno=int(sys.argv[1])).sendall(frame(WorkerReady({forms})))


def score(completion, reference, prompt_text, metadata):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place in (tmp_path, *tmp_path.parents[:2]):
        place.chmod(0o755)  # the worker's user is another one
    (tmp_path / "scorers.py").write_text(SCORERS)
    return tmp_path


# --- kinds ----------------------------------------------------------------------------------------------------------


def test_scorers_that_need_the_same_share_workers_and_the_others_have_their_own() -> None:
    fields: list[dict[str, Any]] = [
        {},
        {"memory_mb": 512},
        {"device": "cpu"},
        {},
        {"num_workers": 2},
        {"memory_mb": 512},
        {"num_workers": 2},
        {"python": "/opt/judge/bin/python"},
        {"needs": {"network": True}},
        {"use": "evaluation"},
        {"use": "evaluation"},
    ]
    scorers = [{"name": "exact_match", "label": str(number), **one} for number, one in enumerate(fields)]
    kinds = kinds_of(settings_of(*scorers, num_workers=3))
    found = [(tuple(spec.index for spec in kind.scorers), kind.num_workers) for kind in kinds]
    assert found == [((0, 3), 3), ((1, 5), 3), ((2,), 3), ((4,), 2), ((6,), 2), ((7,), 3), ((8,), 3), ((9, 10), 3)]
    assert [kind.memory_mb for kind in kinds] == [0, 512, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"device": "gpu"}, "device is 'gpu': write `cpu`, or the number of a GPU as `cuda:1`"),
        ({"device": "cuda:-1"}, "device is 'cuda:-1'"),
        ({"memory_mb": 10}, "memory_mb\n.*128"),
        ({"num_workers": 0}, "num_workers"),
        ({"name": "code", "device": "cuda:0"}, "no `device`"),
    ],
)
def test_invalid_isolation_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings_of({"name": "exact_match", **fields})


# --- Python environments --------------------------------------------------------------------------------------------


def environment(folder: Path, prepare: Callable[[Path], object]) -> Path:
    """Make a virtual environment whose packages `prepare` writes into its folder for them; return its interpreter."""
    venv.create(folder / "venv", symlinks=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    prepare(packages)
    return folder / "venv" / "bin" / "python"


def add_msgspec(packages: Path) -> None:
    shutil.copytree(Path(msgspec.__file__).parent, packages / "msgspec")


def test_scorer_runs_in_its_own_environment_which_has_only_msgspec(folder: Path) -> None:
    python = environment(folder, add_msgspec)
    scorer = {"name": f"{folder}/scorers.py:environment", "python": str(python), "retries": 0}
    chosen = settings_of(scorer, {"name": "exact_match"})
    check_scorers(chosen)
    with ScoringPool(chosen) as pool:
        own, shared = scored(pool, task(str(folder / "venv"), scorers=(0, 1)))
    assert own.value == 1.0, own.problem
    assert shared.value == 0.0


def test_plug_in_of_another_environment_is_found_there(folder: Path) -> None:
    def prepare(packages: Path) -> None:
        add_msgspec(packages)
        (packages / "judges.py").write_text("def judge(completion, reference, prompt_text, metadata): return 2.0\n")
        (packages / "judges-1.dist-info").mkdir()
        (packages / "judges-1.dist-info" / "METADATA").write_text("Name: judges\nVersion: 1\n")
        (packages / "judges-1.dist-info" / "entry_points.txt").write_text("[starling.scorers]\nj = judges:judge\n")

    python = environment(folder, prepare)
    with ScoringPool(settings_of({"name": "j", "python": str(python)})) as pool:
        assert scored(pool, task("a"))[0].value == 2.0
    with pytest.raises(ConfigError, match="no scorer 'k'"):
        check_scorers(settings_of({"name": "k", "python": str(python)}))
    with pytest.raises(ValueError, match="no scorer 'j'"):
        settings_of({"name": "j"})


def test_nothing_of_an_environment_runs_before_its_worker_is_confined(folder: Path) -> None:
    """A `.pth` file runs when Python starts, and a worker that is not confined yet has more rights than a scorer."""

    def prepare(packages: Path) -> None:
        add_msgspec(packages)
        (packages / "early.pth").write_text("import early\n")
        (packages / "early.py").write_text(
            "import ctypes\nresult = ctypes.CDLL(None, use_errno=True).unshare(0x10000000)\n"
        )
        (packages / "asks.py").write_text("import early\ndef f(c, r, p, m): return float(early.result)\n")

    python = environment(folder, prepare)
    with ScoringPool(settings_of({"name": "asks:f", "python": str(python)})) as pool:
        (score,) = scored(pool, task("a"))
    assert score.value == -1.0, "it could make a user namespace"


@pytest.mark.parametrize(
    ("prepare", "problem"),
    [
        (lambda packages: None, r"cannot import msgspec \(ModuleNotFoundError.*workers need 0\.21 or later: install"),
        (
            lambda packages: (packages / "msgspec.py").write_text("__version__ = '0.18.6'\n"),
            r"has msgspec 0\.18\.6, and workers need 0\.21 or later: install it there",
        ),
    ],
)
def test_environment_that_lacks_msgspec_is_named_in_one_sentence(
    folder: Path, prepare: Callable[[Path], object], problem: str
) -> None:
    python = environment(folder, prepare)
    with pytest.raises(ConfigError, match=problem) as raised:
        check_scorers(settings_of({"name": "exact_match", "python": str(python)}))
    assert str(python) in str(raised.value)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (None, "cannot be run as a Python interpreter .No such file"),
        ("#!/bin/sh\nexit 3\n", "it ended with 3"),
        ("#!/bin/sh\necho hello\n", "it does not answer as one"),
        ("#!/bin/sh\necho '[[3, 9], \"/usr/bin/python3.9\", []]'\n", r"a Python 3\.9, and workers need 3\.11 or later"),
    ],
)
def test_program_that_is_no_fitting_interpreter_is_named(tmp_path: Path, program: str | None, problem: str) -> None:
    path = tmp_path / "python"
    if program is not None:
        path.write_text(program)
        path.chmod(0o755)
    with pytest.raises(ConfigError, match=problem):
        find_interpreter(path)


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.21.1", (0, 21)), ("1.0", (1, 0)), ("0.20.0rc1", (0, 20)), ("main", (0, 0)), ("", (0, 0)), ("0.x.1", (0, 0))],
)
def test_version_of_a_package(text: str, version: tuple[int, int]) -> None:
    assert version_of(text) == version


# --- devices --------------------------------------------------------------------------------------------------------


def test_scorer_of_the_cpu_sees_no_gpu(folder: Path) -> None:
    with ScoringPool(settings_of({"name": f"{folder}/scorers.py:devices", "device": "cpu"})) as pool:
        assert scored(pool, task(""))[0].value == 1.0


@pytest.mark.parametrize(
    ("seen", "chosen"), [(None, "1"), ("4,5", "5"), ("GPU-a, GPU-b", "GPU-b"), ("4", ConfigError), ("", ConfigError)]
)
def test_number_of_a_gpu_counts_those_that_the_service_sees(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, chosen: Any
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    (kind,) = kinds_of(settings_of({"name": "exact_match", "device": "cuda:1"}))
    assert kind.needs.devices == ("gpu",)
    shown = kind.needs.model_copy(update={"devices": ("/dev/null",)})  # a machine without a GPU has it, too
    if chosen is ConfigError:
        with pytest.raises(ConfigError, match=r"the service sees \d GPUs"):
            device_variables("cuda:1", shown)
    else:
        assert device_variables("cuda:1", shown) == {"CUDA_VISIBLE_DEVICES": chosen}
    if not kind.needs.device_files():
        with pytest.raises(ConfigError, match="this machine shows no GPU"):
            device_variables("cuda:1", kind.needs)


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["private", "file", "shared"])
def test_scorer_that_takes_more_memory_than_its_limit_is_ended(folder: Path, what: str) -> None:
    scorer = {"name": f"{folder}/scorers.py:grows", "label": "grows", "memory_mb": 256, "retries": 0}
    with ScoringPool(settings_of(scorer, timeout_s=PATIENCE_S)) as pool:
        (score,) = scored(pool, task(what))
        assert (score.status, score.problem) == (Status.REWARD_ERROR, "scorer 'grows' exceeded its limit of 256 MiB.")
        assert pool.gauges()["workers_replaced"] == 1


def test_import_that_takes_more_memory_than_the_limit_fails_the_start(folder: Path) -> None:
    (folder / "large.py").write_text("kept = bytearray(1 << 30)\ndef f(c, r, p, m): return 1.0\n")
    with pytest.raises(ConfigError, match=r"MemoryError|exceeded the limit of 256 MiB: raise memory_mb"):
        check_scorers(settings_of({"name": f"{folder}/large.py:f", "memory_mb": 256}))


# --- liars, and groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forms", ["((0, ScorerForm()), (9, ScorerForm()))", "((0, ScorerForm()), (1, ScorerForm(keys=('x', 'y'))))"]
)
def test_liar_that_shares_workers_is_separated_and_quarantined(folder: Path, forms: str) -> None:
    """It speaks for the honest scorer, too: of it, nothing that was said before holds then."""
    (folder / "liar.py").write_text(LIAR.format(forms=forms))
    liar = {"name": f"{folder}/liar.py:score", "label": "liar"}
    honest = {"name": "exact_match", "label": "honest"}
    chosen = settings_of(liar, honest)
    check_scorers(chosen)
    with ScoringPool(chosen) as pool:
        lied, *scores = scored(pool, task("r", prompt=PROMPT, scorers=(0, 1)))
        assert (lied.value, lied.status) == (None, Status.REWARD_ERROR)
        assert "'liar' is quarantined, since no worker of it can be started: sent a message" in lied.problem
        assert [score.value for score in scores] == [1.0]
        assert pool.quarantined().keys() == {"liar"}
        assert pool.is_ready
        assert pool.gauges()["scorers_quarantined"] == 1.0
        again = scored(pool, task("r", "s", prompt=PROMPT, scorers=(0, 1)))
        assert [score.value for score in again] == [None, 1.0, None, 0.0]


def test_scorer_that_can_be_started_again_is_restored(folder: Path) -> None:
    file = folder / "comes.py"
    file.write_text("def f(c, r, p, m): return 1.0\n")
    chosen = settings_of({"name": f"{file}:f", "num_workers": 1}, {"name": "exact_match"})
    check_scorers(chosen)
    file.write_text("raise OSError('not yet')\n")
    with ScoringPool(chosen) as pool:
        assert scored(pool, task("r", prompt=PROMPT))[0].problem.startswith(f"scorer '{file}:f' is quarantined")
        file.write_text("def f(c, r, p, m): return 1.0\n")
        end = time.monotonic() + PATIENCE_S
        while pool.quarantined():
            pool.poll(0.5)
            assert time.monotonic() < end
        assert scored(pool, task("r", prompt=PROMPT))[0].value == 1.0


def test_group_that_a_comparing_scorer_gives_up_on_is_lost_together(folder: Path) -> None:
    scorer = {"name": f"{folder}/scorers.py:Group", "retries": 1}
    with ScoringPool(settings_of(scorer)) as pool:
        scores = scored(pool, task("a", "exit", "b"))
        (lost,) = pool.take_lost()
    assert {score.status for score in scores} == {Status.REWARD_ERROR}
    assert [one.text for one in lost.completions] == ["a", "exit", "b"]


def test_workers_that_are_replaced_again_and_again_get_a_lower_priority(folder: Path) -> None:
    (folder / "ends.py").write_text(
        "import os\n\n\ndef f(completion, reference, prompt_text, metadata):\n"
        "    return os._exit(3) if completion == 'exit' else float(os.nice(0))\n"
    )
    own = os.nice(0)
    with ScoringPool(settings_of({"name": f"{folder}/ends.py:f", "retries": 0})) as pool:
        found = scored(pool, task("a", "exit", "exit", "b", "exit", "c"))
    assert [score.value for score in found] == [own, None, None, own, None, min(19, own + 10)]
