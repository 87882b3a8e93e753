"""A run on two machines with systemd, by `starling deploy systemd`: failures, a reboot, a stop, wrong installations.

Machine `near` has the controller, the policy and the reward service; rollouts on machine `far` join with their keys
alone. Both are containers of systemd-nspawn on a network of their own. The recipe is that of the quickstart, with
smaller steps.
"""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from systemd_machine import PROGRAM, Machine, machines

ADDRESSES = {"near": "10.79.0.1", "far": "10.79.0.2"}
CONTROLLER = f"tcp://{ADDRESSES['near']}:5555"
FOLDER = "/var/lib/starling"
SETTINGS = (
    *("--network.port", "5555", "--rollouts", "2", "--launch.num-rollouts", "2"),
    *("--sft.num-steps", "150", "--rl.num-steps", "100000", "--rl.prompts-per-step", "8", "--rl.group-size", "8"),
    *("--evaluation.at-start=false", "--evaluation.at-end=false", "--controller.save-every", "10"),
    *("--controller.start-s", "3000"),  # how long the run waits for a machine that boots
)
RUN_S = 1500.0
"""Deadline of what a run does, on a busy machine."""
NEAR = ("starling-controller.service", "starling-policy@0.service", "starling-reward.service")
FAR = ("starling-rollout@0.service", "starling-rollout@1.service")
OTHER = "/opt/other/bin/starling"
MAX_RESTARTS = 4
"""Of a unit that cannot work: StartLimitBurst of the units."""
AVERAGED = 20
"""Steps whose mean reward is compared."""

pytestmark = pytest.mark.timeout(7200)


@dataclass(frozen=True)
class Lab:
    """Two machines, and the run on them."""

    near: Machine
    far: Machine

    def install(self, where: Machine, role: str, *flags: str) -> str:
        """Install a service as the documentation says, and return what the command prints."""
        said = where.run(str(PROGRAM), "deploy", "systemd", "--role", role, "--program", str(PROGRAM), *flags)
        where.run("sh", "-c", "systemd-sysusers && systemctl daemon-reload")
        return said

    def copy(self, source: Machine, path: str, target: Machine, to: str, owner: str) -> None:
        """Copy a file from one machine to another, for its owner only."""
        target.write(to, source.run("cat", path), "0600")
        target.run("sh", "-c", 'chown -R "$0:" "$1" && chmod 0700 "$1" "$(dirname "$1")"', owner, str(Path(to).parent))
        target.run("chown", f"{owner}:", str(Path(to).parents[1]))

    def give_key(self, target: Machine, name: str, folder: str = FOLDER, owner: str = "starling") -> None:
        """Copy the key of a replica to its machine."""
        self.copy(self.near, f"{FOLDER}/keys/{name}.json", target, f"{folder}/keys/{name}.json", owner)

    def machine_of(self, unit: str) -> Machine:
        """Return the machine of a unit."""
        return self.far if "rollout" in unit else self.near

    def value(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.machine_of(unit).value(unit, name)

    def log(self, unit: str) -> str:
        """Return the journal of a unit."""
        return self.machine_of(unit).log(unit)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl of a kind."""
        command = f'grep -F \'"kind": "{kind}"\' {FOLDER}/metrics.jsonl || true'
        text = self.near.run("sh", "-c", command)
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def num_steps(self) -> int:
        """The newest step."""
        return max((line["step"] for line in self.lines("step")), default=0)

    def rewards(self) -> list[float]:
        """Return the mean reward of each step, in their order."""
        return [line["reward_mean"] for line in self.lines("step") if line["phase"] == "rl"]

    def is_active(self, *units: str) -> bool:
        """Return whether systemd says that all these are active."""
        return all(self.value(unit, "ActiveState") == "active" for unit in units)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition()` is true; the journals are shown if it takes too long."""
        begun = time.monotonic()
        while not condition():
            if time.monotonic() > begun + RUN_S:
                print(self.journals())
                raise AssertionError(f"waited {RUN_S:.0f} s for {what}")
            time.sleep(1.0)
        print(f"{what}: after {time.monotonic() - begun:.0f} s, at step {self.num_steps}", flush=True)

    def wait_for_steps(self, num: int, what: str) -> None:
        """Wait for `num` more steps of reinforcement learning."""
        made = len(self.rewards())
        self.wait(lambda: len(self.rewards()) >= made + num, what)

    def journals(self) -> str:
        """Return the ends of all journals."""
        return "\n".join(
            f"--- {one.name}\n" + one.run("journalctl", "--no-pager", "--lines=80", "--unit=starling*", check=False)
            for one in (self.near, self.far)
        )

    def kill(self, unit: str, signal: str = "KILL") -> None:
        """Send a signal to the main process of a unit."""
        self.machine_of(unit).run("systemctl", "kill", f"--signal={signal}", "--kill-whom=main", unit)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Boot both machines, and install the services on them."""
    with machines(tmp_path_factory.mktemp("lab"), ADDRESSES) as (near, far):
        made = Lab(near, far)
        install_near(made)
        for number in (0, 1):
            install_rollout(made, number)
        yield made


def install_near(lab: Lab) -> None:
    """Install controller, policy and reward, and prepare the run."""
    near = lab.near
    lab.install(near, "controller")
    for role in ("policy", "reward"):
        lab.install(near, role, "--controller", CONTROLLER)
    near.run(str(PROGRAM), "prepare", "/srv/starling/recipes/quickstart.toml", "--dir", FOLDER, *SETTINGS)
    near.run("sh", "-c", f"chown -R starling: {FOLDER} && cp {FOLDER}/config.toml /etc/starling/recipe.toml")
    near.run(
        "sh", "-c", f"for file in /etc/starling/*.env; do echo STARLING_NETWORK__HOST={near.address} >>$file; done"
    )
    lab.give_key(near, "reward-0", "/var/lib/starling-reward", "starling-reward")


def install_rollout(lab: Lab, number: int) -> None:
    """Install a rollout that joins with its key, which is all that its machine gets."""
    said = lab.install(lab.far, "rollout", "--join", "--number", str(number), "--controller", CONTROLLER)
    assert f"copy keys/rollout-{number}.json of the controller's folder to {FOLDER}/keys" in said
    assert f"systemctl enable --now starling-rollout@{number}.service starling.target" in said
    lab.give_key(lab.far, f"rollout-{number}")


def make_rollout(lab: Lab, number: int) -> None:
    """Make the key of a further rollout if there is none, and install it."""
    names = lab.near.run("ls", f"{FOLDER}/keys").split()
    if f"rollout-{number}.json" not in names:
        lab.near.run(str(PROGRAM), "keys", "make", f"{FOLDER}/keys", f"rollout-{number}")
    install_rollout(lab, number)


def start(lab: Lab, where: Machine, *units: str) -> None:
    """Enable and start units, without waiting for them."""
    where.run("systemctl", "enable", *units, "starling.target")
    where.run("systemctl", "start", "--no-block", *units, "starling.target")


def test_run_on_two_machines(lab: Lab) -> None:
    """It survives kills, a partition, a hang, a reboot and a stop, and learns."""
    start(lab, lab.far, *FAR)  # in any order: the controller is not there yet
    start(lab, lab.near, *NEAR)
    lab.wait(lambda: lab.is_active(*NEAR, *FAR), "all units are active")
    for unit in (*NEAR[1:], *FAR):
        assert lab.value(unit, "StatusText").startswith("joined"), unit
    lab.wait_for_steps(5, "steps with rollouts of the other machine")
    check_kills(lab)
    check_added_rollout(lab)
    check_partition(lab)
    check_hang(lab)
    check_reboot(lab)
    check_stop_and_start(lab)
    check_learning(lab)


def check_kills(lab: Lab) -> None:
    """Kill a rollout, and then the controller: systemd starts both again."""
    for unit in (FAR[0], NEAR[0]):
        lab.kill(unit)
        lab.wait(lambda unit=unit: lab.value(unit, "NRestarts") == "1", f"{unit} is started again")  # type: ignore[misc]
        lab.wait(lambda unit=unit: lab.is_active(unit), f"{unit} is active again")  # type: ignore[misc]
        lab.wait_for_steps(3, f"steps after the end of {unit}")
    assert lab.value(NEAR[1], "NRestarts") == "0", "a policy outlives the controller's process"


def check_added_rollout(lab: Lab) -> None:
    """Add a rollout while the run goes on, and stop it: its work goes to others."""
    unit = "starling-rollout@2.service"
    make_rollout(lab, 2)
    start(lab, lab.far, unit)
    lab.wait(lambda: lab.is_active(unit), "the added rollout is active")
    lab.wait(lambda: "version" in lab.value(unit, "StatusText"), "the added rollout has weights")
    lab.far.run("systemctl", "disable", "--now", unit, timeout_s=RUN_S)
    assert (lab.value(unit, "ActiveState"), lab.value(unit, "Result")) == ("inactive", "success")
    assert "reason='it left: stopped by SIGTERM' replica=rollout-2" in lab.log(NEAR[0])
    lab.wait_for_steps(3, "steps after a rollout was stopped")


def check_partition(lab: Lab) -> None:
    """Cut the network between the machines, and connect it again: nothing is restarted."""
    before = [lab.value(unit, "NRestarts") for unit in FAR]
    lab.far.connect(False)
    silent = "it was silent for"
    lab.wait(lambda: lab.log(NEAR[0]).count(silent) >= len(FAR), "the controller notices that a machine is away")
    lab.far.connect(True)
    lab.wait_for_steps(3, "steps after the network was cut")
    assert [lab.value(unit, "NRestarts") for unit in FAR] == before


def check_hang(lab: Lab) -> None:
    """Stop a reward service by SIGSTOP: the watchdog of its unit, as installed, ends it, and it is started again."""
    unit = NEAR[2]
    first = lab.value(unit, "MainPID")
    lab.kill(unit, "STOP")
    lab.wait(lambda: "Watchdog timeout" in lab.log(unit), "the watchdog notices a process that hangs")
    lab.wait(lambda: lab.is_active(unit) and lab.value(unit, "MainPID") != first, "it is started again")
    assert lab.value(unit, "NRestarts") == "1"
    lab.wait_for_steps(3, "steps after a hang")


def check_reboot(lab: Lab) -> None:
    """Switch the machine of the rollouts off and on: they are started with it, and join again."""
    lab.far.switch_off()
    lab.far.boot()
    lab.wait(lambda: lab.is_active(*FAR), "rollouts are active after a reboot")
    assert [lab.value(unit, "NRestarts") for unit in FAR] == ["0", "0"]
    lab.wait_for_steps(3, "steps after a reboot")


def check_stop_and_start(lab: Lab) -> None:
    """Stop the run by its controller, which ends all units; start all again, which go on from the last step."""
    lab.near.run("systemctl", "stop", NEAR[0], timeout_s=RUN_S)
    units = (*NEAR, *FAR)
    lab.wait(lambda: all(lab.value(unit, "ActiveState") == "inactive" for unit in units), "all units have ended")
    assert {lab.value(unit, "Result") for unit in units} == {"success"}
    outcome = json.loads(lab.near.run("cat", f"{FOLDER}/outcome.json"))
    assert outcome["outcome"] == "stopped"
    assert outcome["version"] == lab.num_steps
    assert lab.near.run("ls", f"{FOLDER}/checkpoints").split() == [f"step-{outcome['version']}"]
    for where in (lab.near, lab.far):
        where.run("systemctl", "start", "--no-block", "starling.target")
    lab.wait(lambda: lab.is_active(*units), "all units are active again")
    assert f"version={outcome['version']}" in next(
        line for line in reversed(lab.log(NEAR[0]).splitlines()) if "taken_up" in line
    )
    lab.wait_for_steps(3, "steps after a stop and a start")


def check_learning(lab: Lab) -> None:
    """Wait until the reward has grown; each prompt was trained once."""

    def gain() -> float:
        rewards = lab.rewards()
        return (sum(rewards[-AVERAGED:]) - sum(rewards[:AVERAGED])) / AVERAGED if len(rewards) > AVERAGED else 0.0

    lab.wait(lambda: gain() > 0.1, "the reward grows")
    print(f"mean reward of {AVERAGED} steps: {gain():+.3f} after {len(lab.rewards())} steps")
    trained = Counter(prompt for line in lab.lines("trained") for prompt in line["prompts"])
    assert set(trained.values()) == {1}


# --- wrong installations, while the run goes on ---------------------------------------------------------------------


@pytest.fixture
def running(lab: Lab) -> Lab:
    """Return the lab when its controller and its reward service are active, and start them if they are not."""
    start(lab, lab.near, NEAR[0], NEAR[2])
    lab.wait(lambda: lab.is_active(NEAR[0], NEAR[2]), "the controller and the reward service are active")
    return lab


def end_of(lab: Lab, unit: str) -> str:
    """Start a unit that cannot work, and return its journal when systemd has given it up."""
    where = lab.machine_of(unit)
    where.run("sh", "-c", f"systemctl daemon-reload && systemctl reset-failed {unit} || true")
    position = where.log_position()
    where.run("systemctl", "start", "--no-block", unit)
    lab.wait(lambda: lab.value(unit, "ActiveState") == "failed", f"{unit} has failed")
    assert int(lab.value(unit, "NRestarts")) <= MAX_RESTARTS
    log = where.log(unit, position)
    assert "Traceback" not in log, log
    return log


def test_revoked_key_is_named(running: Lab) -> None:
    lab = running
    make_rollout(lab, 3)
    lab.near.run(str(PROGRAM), "keys", "revoke", f"{FOLDER}/keys", "rollout-3")
    log = end_of(lab, "starling-rollout@3.service")
    assert f"the controller at {CONTROLLER} refuses the key of rollout-3; use the key file that was made for" in log


def test_key_of_another_name_is_named(running: Lab) -> None:
    lab = running
    make_rollout(lab, 4)
    lab.copy(lab.near, f"{FOLDER}/keys/rollout-1.json", lab.far, f"{FOLDER}/keys/rollout-4.json", "starling")
    unit = "starling-rollout@4.service"
    assert f"the key {FOLDER}/keys/rollout-4.json was made for rollout-1, not for rollout-4" in end_of(lab, unit)
    assert lab.value(unit, "NRestarts") == "0", "a wrong key file does not improve"


def test_other_version_is_named(running: Lab) -> None:
    lab = running
    make_rollout(lab, 2)
    unit = "starling-rollout@2.service"
    change = "s/^PROTOCOL_VERSION = 1$/PROTOCOL_VERSION = 7/"
    lab.far.run("sh", "-c", "mkdir -p /opt/other/bin && cp -r /srv/starling/libs/common /opt/other")
    lab.far.run("sed", "-i", change, "/opt/other/common/starling/common/wire/structs.py")
    lab.far.run("sh", "-c", f"sed 's|PYTHONPATH=|&/opt/other/common:|' {PROGRAM} > {OTHER}")
    lab.far.run("chmod", "0755", OTHER)
    path = f"/etc/systemd/system/{unit}.d/join.conf"
    lab.far.run("sed", "-i", f"s|{PROGRAM}|{OTHER}|", path)
    sentence = "the controller refuses rollout-2: it speaks version 7 of the protocol, and the controller version 1"
    assert f"{sentence}; install the same version of Starling for both" in end_of(lab, unit)
    lab.far.run("sed", "-i", f"s|{OTHER}|{PROGRAM}|", path)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the preloaded clock")
def test_wrong_clock_is_named(running: Lab) -> None:
    """The clock of the reward service is an hour ahead: the controller names it, and the run goes on."""
    lab, unit = running, NEAR[2]
    source = "/srv/starling/tests/system/chaos/wall_clock.c"
    lab.near.run("sh", "-c", f"mkdir -p /opt/clock && cc -shared -fPIC -O2 -o /opt/clock/wall_clock.so {source}")
    offset = "".join(f"\\{byte:03o}" for byte in struct.pack("<q", 3600 * 10**9))
    lab.near.run("sh", "-c", f"printf '{offset}' >/opt/clock/offset")
    drop_in = f"/etc/systemd/system/{unit}.d/clock.conf"
    preload = "LD_PRELOAD=/opt/clock/wall_clock.so WALL_CLOCK_OFFSET=/opt/clock/offset"
    lab.near.write(drop_in, f"[Service]\nEnvironment={preload}\n")
    lab.near.run("sh", "-c", f"systemctl daemon-reload && systemctl restart {unit}", timeout_s=RUN_S)
    lab.wait(lambda: "clock_skew" in lab.log(NEAR[0]), "the controller names the clock")
    (line,) = [line for line in lab.log(NEAR[0]).splitlines() if "clock_skew" in line]
    assert "reward-0" in line
    assert "set both by NTP" in line or "3600" in line or "3599" in line
    assert lab.is_active(unit)
    lab.near.run("sh", "-c", f"rm {drop_in} && systemctl daemon-reload && systemctl restart {unit}", timeout_s=RUN_S)


@pytest.mark.parametrize("fault", ["full", "read-only"])
@pytest.mark.parametrize("unit", ["starling-rollout@2.service", NEAR[0]], ids=["rollout", "controller"])
def test_folder_that_cannot_be_written_is_named(running: Lab, unit: str, fault: str) -> None:
    """The unit fails with the name of the file or the folder."""
    lab, where = running, running.machine_of(unit)
    make_rollout(lab, 2)
    where.run("systemctl", "stop", unit, timeout_s=RUN_S)
    where.run("sh", "-c", f"mount -t tmpfs -o size=32k,mode=0700 small {FOLDER} && mkdir {FOLDER}/keys")
    if "rollout" in unit:
        lab.give_key(where, "rollout-2")
    where.run("sh", "-c", f"chown -R starling: {FOLDER}")
    where.run("sh", "-c", f"cat /dev/zero >{FOLDER}/ballast || true")
    if fault == "read-only":
        where.run("mount", "-o", "remount,ro", FOLDER)
    try:
        log = end_of(lab, unit)
        assert {"full": "No space left on device", "read-only": "Read-only file system"}[fault] in log
        assert f"{FOLDER}/" in log
    finally:
        where.run("umount", FOLDER)
