"""A terminal in which the tutorial's commands are typed: one shell that stays, with its output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

PERIOD_S: Final = 0.2
BLOCK_S: Final = 3000.0
"""Deadline for the commands of one block, on a busy machine."""
EARLY_S: Final = 120.0
"""How long a block is repeated that was typed before the other terminal's command was ready for it."""


class Terminal:
    """One shell in a folder. Use it as a context: its end kills all that the shell has started."""

    def __init__(self, name: str, folder: Path, files: Path) -> None:
        """Start a shell in `folder`; its scripts and its output go to the folder `files`."""
        self.name = name
        self._files = files / name.replace(" ", "-").lower()
        self._files.mkdir(parents=True)
        self._output = self._files / "output"
        self._num_blocks = 0
        with self._output.open("w") as output:
            self._shell = subprocess.Popen(
                ["bash", "--norc"],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()

    @property
    def output(self) -> str:
        """What its commands have printed so far."""
        return self._output.read_text()

    def type(self, script: str) -> None:
        """Type a block of commands, once those before it have ended. Does not wait for its own end."""
        self.wait()
        self._num_blocks += 1
        block = self._files / f"block-{self._num_blocks}.sh"
        block.write_text(script)
        ended = self._ended()
        assert self._shell.stdin is not None
        self._shell.stdin.write(
            f"failed=0; trap 'failed=$?' ERR; source {block}; trap - ERR\n"
            f"echo $failed > {ended}.new; mv {ended}.new {ended}\n"
        )
        self._shell.stdin.flush()

    def type_until_it_works(self, script: str) -> None:
        """Type a block again and again, until all of its commands succeed: what it needs may still be starting."""
        deadline = time.monotonic() + EARLY_S
        while True:
            self.type(script)
            code = self._code()
            if code == 0:
                return
            assert time.monotonic() < deadline, f"{self.name}: exit code {code} of\n{script}\n{self.output}"
            self._ended().unlink()
            self._num_blocks -= 1
            time.sleep(PERIOD_S)

    def wait(self) -> None:
        """Wait until all that was typed has ended. Raises AssertionError if a command of the last block has failed."""
        if self._num_blocks:
            code = self._code()
            script = (self._files / f"block-{self._num_blocks}.sh").read_text()
            assert code == 0, f"{self.name}: exit code {code} of\n{script}\n{self.output}"

    def _ended(self) -> Path:
        return self._files / f"ended-{self._num_blocks}"

    def _code(self) -> int:
        """Return the exit code of the last command of the last block that failed, or 0, once the block has ended."""
        deadline = time.monotonic() + BLOCK_S
        while not self._ended().exists():
            assert time.monotonic() < deadline, f"{self.name}: no end within {BLOCK_S:g} s\n{self.output}"
            assert self._shell.poll() is None, f"{self.name}: the shell has ended\n{self.output}"
            time.sleep(PERIOD_S)
        return int(self._ended().read_text())
