"""Files that a tool's module leaves in `/tmp` when it is imported: each session has its own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from starling.common.sandbox.launch import Mechanism, problem_of
from starling.common.sandbox.settings import SandboxNeeds
from starling.rollout.env.sandbox.sandbox import Sandbox, SandboxError

LONG_S = 60.0


@pytest.fixture(params=["bubblewrap", "namespaces"])
def level(request: pytest.FixtureRequest) -> Mechanism:
    mechanism: Mechanism = request.param
    if problem := problem_of(mechanism):
        pytest.skip(f"this machine does not offer the level {mechanism}: {problem}")
    return mechanism


def called(file: Path, level: Mechanism, *names: str) -> list[Any]:
    """Return what the functions return, each called in a session of its own."""

    async def run() -> list[Any]:
        found = []
        for name in names:
            async with sandbox.session() as session:
                found.append(await session.call(["read", "write"].index(name), {}, timeout_s=LONG_S))
        return found

    sandbox = Sandbox(
        [f"{file}:read", f"{file}:write"], what="Tool", level=level, needs=SandboxNeeds(paths=(file.with_name("size"),))
    )
    try:
        return asyncio.run(run())
    finally:
        sandbox.close()


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    file = tmp_path / "leaving_tools.py"
    shutil.copy(Path(__file__).with_name("leaving_tools.py"), file)
    (tmp_path / "size").write_text("10")
    tmp_path.chmod(0o755)
    return file


def test_each_session_has_its_own_files_of_imports(level: Mechanism, tools: Path) -> None:
    first, changed, last = called(tools, level, "read", "write", "read")
    assert first == last == "wwwwwwwwww ['deep', 'link']"
    assert changed == "changed ['added', 'deep', 'link']"


def test_large_files_of_imports_are_read_only(level: Mechanism, tools: Path) -> None:
    tools.with_name("size").write_text(str(5 << 20))
    with pytest.raises(SandboxError, match="Read-only file system"):
        called(tools, level, "write")
    assert called(tools, level, "read") == ["w" * 20 + " ['deep', 'link', 'pipe']"]
