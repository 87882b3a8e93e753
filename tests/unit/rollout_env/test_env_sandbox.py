"""The sandbox with real processes, and failures of user code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from starling.common.errors import ConfigError
from starling.rollout.env.sandbox.sandbox import Sandbox, SandboxError, SandboxTimeoutError

HERE = Path(__file__).with_name("some_tools.py")
NAMES = [
    "add", "later", "table", "fails", "leaves", "crashes", "never_returns", "count", "environment", "devours",
    "limits", "strange", "Guess", "takes_all_processors", "computes", "Computes",
]  # fmt: skip
LONG_S = 60.0


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    os.environ["STARLING_SECRET"] = "do not tell"
    made = Sandbox([f"{HERE}:{name}" for name in NAMES], what="Tool", memory_mb=1024, max_processes=3)
    yield made
    made.close()
    del os.environ["STARLING_SECRET"]


async def call(sandbox: Sandbox, name: str, timeout_s: float = LONG_S, **named: Any) -> Any:
    async with sandbox.session() as session:
        return await session.call(NAMES.index(name), named, timeout_s=timeout_s)


def test_sandboxed_functions_return_values(sandbox: Sandbox) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(
            call(sandbox, "add", a=1, b=2.5),
            call(sandbox, "later", text="abc"),
            call(sandbox, "table"),
            *(call(sandbox, "count") for _ in range(5)),
        )

    total, text, table, *counts = asyncio.run(run())
    assert (total, text, table) == (3.5, "cba", {"rows": [1, 2], "é": None})
    assert counts == [1] * 5, "calls must not share state"


@pytest.mark.parametrize(
    ("name", "named", "problem"),
    [
        ("fails", {"what": "map"}, "LookupError: there is no map"),
        ("add", {"a": 1}, "TypeError: .*missing 1 required positional argument: 'b'"),
        ("add", {"a": 1, "b": 2, "c": 3}, "TypeError: .*unexpected keyword argument 'c'"),
        ("leaves", {}, "SystemExit: 3"),
        ("crashes", {}, "it ended its process"),
        ("devours", {"mb": 4096}, "MemoryError"),
    ],
)
def test_failed_calls_are_described(sandbox: Sandbox, name: str, named: dict[str, Any], problem: str) -> None:
    with pytest.raises(SandboxError, match=problem):
        asyncio.run(call(sandbox, name, **named))
    assert asyncio.run(call(sandbox, "add", a=1, b=1)) == 2, "later calls still work"


def test_sandbox_inherits_no_environment_variables(sandbox: Sandbox) -> None:
    assert set(asyncio.run(call(sandbox, "environment"))) <= {
        "PATH", "LANG", "LC_CTYPE", "PYTHONPATH", "OMP_NUM_THREADS", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PWD"
    }  # fmt: skip
    assert asyncio.run(call(sandbox, "limits")) == [
        1024 << 20,
        0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1,
    ]


def test_unknown_types_become_text(sandbox: Sandbox) -> None:
    assert asyncio.run(call(sandbox, "strange")).startswith("<object object")


def marked(marker: str) -> list[int]:
    """Return the living processes with `marker` in their command line."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if marker in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


def wait_for(condition: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.05)


def test_hanging_call_is_killed_with_its_children(sandbox: Sandbox) -> None:
    marker, seen = f"hanging-{os.getpid()}", list[int]()

    async def run(timeout_s: float) -> None:
        task = asyncio.create_task(call(sandbox, "never_returns", timeout_s=timeout_s, marker=marker))
        while not task.done():
            seen.extend(marked(marker))
            await asyncio.sleep(0.05)
        with pytest.raises(SandboxTimeoutError, match=f"it took longer than {timeout_s:g} s"):
            await task

    for timeout_s in (2.0, 10.0, LONG_S):  # a busy machine may take longer to start anything
        asyncio.run(run(timeout_s))
        if seen:
            break
    assert seen
    wait_for(lambda: not marked(marker), "a child of it lives on")


async def compute_in_session(sandbox: Sandbox, num_calls: int) -> list[str]:
    async with sandbox.session() as session:
        await session.make(NAMES.index("Computes"), {}, timeout_s=LONG_S)
        return [await session.invoke("step", timeout_s=1.0, seconds=0.5) for _ in range(num_calls)]


@pytest.mark.campaign
@pytest.mark.sample(1)
@pytest.mark.parametrize("in_one_session", [False, True])
def test_call_that_takes_all_processors_fails_no_other(sandbox: Sandbox, in_one_session: bool) -> None:
    """An episode could otherwise make the calls of all others time out."""

    async def run() -> list[str]:
        takes_all = asyncio.create_task(call(sandbox, "takes_all_processors"))
        try:
            await asyncio.sleep(1.0)  # it has most likely started
            if in_one_session:
                return await compute_in_session(sandbox, 2)
            return [await call(sandbox, "computes", timeout_s=1.0, seconds=0.5)]
        finally:
            takes_all.cancel()
            await asyncio.wait([takes_all])

    assert set(asyncio.run(run())) == {"done"}


def test_call_begins_with_its_process(sandbox: Sandbox) -> None:
    """The end of another session with much memory may keep the fork server busy for longer than a call may take."""
    found = (one for one in psutil.Process().children(recursive=True) if is_of_tools(one))
    fork_server = min(found, key=psutil.Process.create_time)  # the others are its sessions

    async def run() -> Any:
        fork_server.suspend()
        try:
            task = asyncio.create_task(call(sandbox, "add", timeout_s=1.0, a=1, b=2))
            await asyncio.sleep(3.0)
        finally:
            fork_server.resume()
        return await task

    assert asyncio.run(run()) == 3


def is_of_tools(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()[:1] == ["starling-tools"] and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.campaign
def test_long_session_that_sleeps_ends_at_its_limit(sandbox: Sandbox) -> None:
    """What earlier calls have used and waited does not count."""

    async def run() -> None:
        async with sandbox.session() as session:
            await session.make(NAMES.index("Computes"), {}, timeout_s=LONG_S)
            await session.invoke("step", timeout_s=LONG_S, seconds=0.2)
            with pytest.raises(SandboxTimeoutError, match="it took longer than 2 s"):
                await session.invoke("sleep", timeout_s=2.0)

    asyncio.run(run())


def test_cancelled_call_is_killed(sandbox: Sandbox) -> None:
    marker = f"cancelled-{os.getpid()}"

    async def run() -> None:
        task = asyncio.create_task(call(sandbox, "never_returns", marker=marker))
        deadline = time.monotonic() + LONG_S
        while not marked(marker):
            assert time.monotonic() < deadline, "it did not start"
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    wait_for(lambda: not marked(marker), "a child of it lives on")


def test_object_lives_for_a_session(sandbox: Sandbox) -> None:
    async def run() -> list[Any]:
        async with sandbox.session() as session:
            await session.make(NAMES.index("Guess"), {"most": 4}, timeout_s=LONG_S)
            first = await session.invoke("reset", timeout_s=LONG_S, seed=6, options={})
            return [first, *[await session.invoke("step", text, timeout_s=LONG_S) for text in ("1", "2")]]

    first, wrong, right = asyncio.run(run())
    assert first == ["a number below 4", {}]
    assert wrong[:3] == ["no", -0.25, False]
    assert right[:3] == ["yes", 1.0, True]


def test_dead_fork_server_is_replaced() -> None:
    made = Sandbox([f"{HERE}:add"], what="Tool")
    try:
        pid = made._fork_server.process.pid
        made._fork_server.process.kill()
        assert not psutil.pid_exists(pid)

        async def run() -> Any:
            async with made.session() as session:
                return await session.call(0, {"a": 2, "b": 3}, timeout_s=LONG_S)

        assert asyncio.run(run()) == 5
    finally:
        made.close()
    assert not psutil.pid_exists(made._fork_server.process.pid)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing_like_it:f", "Tool 'nothing_like_it:f' cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:addd", "no 'addd' in there; did you mean 'add'"),
        (f"{HERE}:NOT_A_FUNCTION", "is a int: name something to call"),
        (f"{HERE}:packed", r"Tool 'packed' has the parameter \*values"),
        ("exits.py:f", "cannot be imported: SystemExit: 5"),
        ("dies.py:f", "importing ended the process"),
        ("sleeps.py:f", "importing took longer than 0.3 s"),
    ],
)
def test_import_failure_is_reported_at_start(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("exits.py").write_text("raise SystemExit(5)")
    Path("dies.py").write_text("import os; os._exit(1)")
    Path("sleeps.py").write_text("import time; time.sleep(3600)")
    with pytest.raises(ConfigError, match=problem):
        Sandbox([name], what="Tool", with_schemas=True, import_s=0.3 if name.startswith("sleeps") else LONG_S)
