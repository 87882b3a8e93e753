"""The launcher `ssh` on a real sshd of the loopback interface: a run on two hosts, one of them lost, nothing left.

Both hosts are this machine, at two addresses and two ports: each has an sshd of its own, which can be killed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "tests" / "system" / "recipes" / "tiny.toml"
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
STARLING = (sys.executable, "-m", "starling.cli.main")
LONG = 100_000
"""Steps of a run that does not come to its end."""
WAIT_S = 900.0
"""Deadline of what a run does, on a busy machine."""

pytestmark = [
    pytest.mark.skipif(SSHD is None or os.geteuid() != 0, reason="needs sshd, and root to start it"),
    pytest.mark.timeout(3600),
]


class Host:
    """One sshd, which only takes the key of the test."""

    def __init__(self, folder: Path, name: str, user_key: Path) -> None:
        self.name, self.port, self.folder = name, free_port(), folder / name
        self.folder.mkdir()
        key = self.folder / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        allowed = self.folder / "authorized_keys"
        allowed.write_text(user_key.with_suffix(".pub").read_text())
        settings = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": key,
            "PidFile": self.folder / "pid",
            "AuthorizedKeysFile": allowed,
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "Subsystem": "sftp internal-sftp",
            "SetEnv": f"PYTHONPATH={os.environ.get('PYTHONPATH', '')} STARTED_BY_TEST={name}",
        }
        (self.folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        self.start()

    def start(self) -> None:
        command = [str(SSHD), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def lose(self) -> None:
        """Kill the sshd and its sessions, as a machine that loses its power; what they ran is killed with it."""
        if self.process.poll() is not None:
            return
        for process in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(60)

    def processes(self) -> list[str]:
        """Return the command lines of the living processes that were started over this host."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("STARTED_BY_TEST") == self.name and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd separates privileges there
    key = tmp_path / "user_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    found = [Host(tmp_path, name, key) for name in ("one", "two")]
    config = tmp_path / "ssh_config"
    blocks = [
        f"Host {host.name}\n HostName 127.0.0.1\n Port {host.port}\n IdentityFile {key}\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {tmp_path / 'known_hosts'}\n StrictHostKeyChecking accept-new\n"
        for host in found
    ]
    config.write_text("".join(blocks))
    yield found
    for host in found:
        host.lose()


def write_prompts(folder: Path) -> None:
    """Write the data of the recipe."""
    words = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]
    rows = [json.dumps({"question": word, "answer": word[::-1]}) for word in words]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def make_run(folder: Path, **launch: Any) -> list[str]:
    """Write the data, and return the command of a run on both hosts."""
    write_prompts(folder)
    places = [
        f"{{host = '{name}', address = '127.0.0.1', python = '{sys.executable}', shared = true}}"
        for name in ("one", "two")
    ]
    flags = {"launcher": "ssh", "hosts": f"[{', '.join(places)}]", "ssh_options": f"['-F', '{folder / 'ssh_config'}']"}
    return [
        *(*STARLING, "run", str(RECIPE)),
        *(f"--launch.{key}={value}" for key, value in {**flags, "num_rollouts": 2, **launch}.items()),
        f"--rl.num-steps={LONG}",
    ]


def wait_until(condition: Callable[[], Any], what: str, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {WAIT_S:g} s\n{log.read_text()[-6000:]}"
        time.sleep(0.2)


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "runs" / "tiny" / "attempt-1" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in (json.loads(text) for text in lines if text.endswith("\n")) if line["kind"] == kind]


def temporary_folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("starling-*-*-*")}


def test_run_on_two_hosts_loses_one_and_leaves_nothing(tmp_path: Path, hosts: list[Host]) -> None:
    one, two = hosts
    before, log = temporary_folders(), tmp_path / "log"
    with log.open("wb") as out:
        run = subprocess.Popen(
            make_run(tmp_path), cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_until(lambda: metrics(tmp_path, "trained"), "step", log)
        assert one.processes(), "each host has replicas"
        assert two.processes()
        assert temporary_folders() - before

        two.lose()
        wait_until(lambda: "was lost with its connection to two" in log.read_text(), "notice of the lost host", log)
        made = len(metrics(tmp_path, "trained"))
        wait_until(lambda: len(metrics(tmp_path, "trained")) > made + 2, "step after the loss", log)

        run.send_signal(signal.SIGINT)
        run.wait(WAIT_S)
        assert run.returncode == 0, log.read_text()[-6000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(60)
    prompts = Counter(prompt for line in metrics(tmp_path, "trained") for prompt in line["prompts"])
    assert set(prompts.values()) == {1}, "a prompt was trained twice"
    wait_until(lambda: not (one.processes() or two.processes()), "end of all processes on the hosts", log)


def test_killed_supervisor_leaves_nothing_on_the_hosts(tmp_path: Path, hosts: list[Host]) -> None:
    before, log = temporary_folders(), tmp_path / "log"
    with log.open("wb") as out:
        run = subprocess.Popen(
            make_run(tmp_path), cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_until(lambda: metrics(tmp_path, "trained"), "step", log)
        assert all(host.processes() for host in hosts)
    finally:
        run.kill()
        run.wait(60)
    wait_until(lambda: not any(host.processes() for host in hosts), "end of all processes on the hosts", log)
    wait_until(lambda: not temporary_folders() - before, "removal of the temporary folders", log)


def test_host_that_refuses_is_one_sentence(tmp_path: Path, hosts: list[Host]) -> None:
    hosts[0].lose()
    hosts[1].lose()
    log = tmp_path / "log"
    with log.open("wb") as out:
        command = make_run(tmp_path, max_restarts=1)
        code = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=WAIT_S)
    text = log.read_text()
    assert code.returncode == 1, text[-3000:]
    assert "was lost with its connection to" in text
    assert "Connection refused" in text


def test_rollouts_join_by_hand_from_another_machine(tmp_path: Path, hosts: list[Host]) -> None:
    """As docs/tutorial/two-machines.md and docs/how-to/join.md say, with ssh in place of the second terminal."""
    folder, there, log = tmp_path / "here", tmp_path / "there", tmp_path / "log"
    folder.mkdir()
    there.mkdir()
    write_prompts(folder)
    attempt = folder / "runs/tiny/attempt-1"
    flags = ["--network.host", "127.0.0.1", "--launch.num-rollouts", "0", "--controller.num-rollouts", "2"]
    with log.open("wb") as out:
        run = subprocess.Popen(
            [*STARLING, "run", str(RECIPE), *flags, "--controller.start-s", str(WAIT_S)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_until(lambda: metrics(folder, "step"), "supervised step, for which the model has been made", log)
        checked(*STARLING, "keys", "make", str(attempt / "keys"), "rollout-0", "rollout-1")
        address = json.loads((attempt / "controller.json").read_text())["address"]
        copied = [str(attempt / "config.toml"), *(str(attempt / f"keys/rollout-{number}.json") for number in (0, 1))]
        checked("scp", "-F", str(tmp_path / "ssh_config"), "-p", *copied, f"two:{there}/")
        by_hand = ["rollout", "--name", "rollout-0", "--config", "config.toml", "--key", "rollout-0.json", "--dir", "."]
        joins = ["join", address, "--role", "rollout", "--key", "rollout-1.json"]
        replicas = [start_on(tmp_path, "two", there, words) for words in ([*by_hand, "--controller", address], joins)]
        wait_until(lambda: run.poll() is not None or any(map(subprocess.Popen.poll, replicas)), "end of the run", log)
        assert run.poll() == 0, log.read_text()[-6000:] + (there / "log").read_text()[-6000:]
        assert [replica.wait(WAIT_S) for replica in replicas] == [0, 0], (there / "log").read_text()[-6000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(60)
    joined = {line["replica"] for line in metrics(folder, "joined") if line["role"] == "rollout"}
    assert joined == {"rollout-0", "rollout-1"}
    wait_until(lambda: not hosts[1].processes(), "end of all processes on the host", log)


def start_on(folder: Path, host: str, there: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """Start a command of Starling on a host, with its output in `log` there."""
    script = f"cd {shlex.quote(str(there))} && exec {shlex.join([*STARLING, *words])} >> log 2>&1"
    return subprocess.Popen(["ssh", "-F", str(folder / "ssh_config"), host, script], stdin=subprocess.DEVNULL)


def checked(*command: str) -> None:
    """Run a command; fail with its output for an exit code other than 0."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
