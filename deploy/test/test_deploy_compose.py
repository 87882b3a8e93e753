"""deploy/compose with real containers: a run that survives what happens to them, the reward service alone, and faults.

DEPLOY_TEST_FOLDER names a folder that keeps the daemon's images between runs of these tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker_host
import docker_images
import pytest
from compose_project import Project, memory_mib, owned_by_service
from docker_host import DockerHost
from docker_images import ROOT

# The first test builds the images.
pytestmark = pytest.mark.timeout(3600)

HOUR_S = 3600
TARGET_REWARD = 0.6
SITE_PACKAGES = "/opt/starling/lib/python3.11/site-packages"
HAS_TORCH = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"

# The quickstart without end: it is stopped when it has learned, however fast the machine is.
ENDLESS = {"num_steps = 600": "num_steps = 1000000", 'schedule = "linear"': 'schedule = "constant"'}
# And a run that reaches its first step sooner, for the faults.
SMALL = ENDLESS | {
    "num_rollouts = 2": "num_rollouts = 1",
    "num_steps = 220": "num_steps = 2",
    "prompts_per_step = 16": "prompts_per_step = 4",
    "group_size = 16": "group_size = 4",
    "at_start = true": "at_start = false",
    "at_end = true": "at_end = false",
}

Say = Callable[[str], None]


@pytest.fixture(scope="module")
def say(pytestconfig: pytest.Config) -> Say:
    """Print progress at once, with the time since the beginning."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    began = time.monotonic()

    def print_now(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)
        print(text)

    return print_now


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, say: Say) -> Iterator[DockerHost]:
    """Yield a daemon that has the images."""
    reason = docker_host.missing()
    if reason:
        pytest.skip(reason)
    kept = os.environ.get("DEPLOY_TEST_FOLDER")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("docker")
    folder.mkdir(parents=True, exist_ok=True)
    with docker_host.docker_host(folder) as started:
        say(f"builds {', '.join(docker_images.TARGETS)}")
        docker_images.build(started, folder)
        say("has the images")
        yield started
    if not kept:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two recipes."""
    made = tmp_path_factory.mktemp("compose")
    (made / "recipes").mkdir()
    for name, changes in (("quickstart", ENDLESS), ("small", SMALL)):
        text = (ROOT / "recipes/quickstart.toml").read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (made / f"recipes/{name}.toml").write_text(text)
    return made


@pytest.fixture(scope="module")
def run(host: DockerHost, folder: Path, say: Say) -> Iterator[Project]:
    """Yield a run of the quickstart that has made its first step."""
    project = Project(host, "run", folder)
    try:
        project.prepare()
        began = time.time()
        project.compose("--profile", "cpu", "up", "--detach", "--wait")
        say(f"all containers are healthy {time.time() - began:.0f} s after `up`")
        project.waits("the first step", lambda: bool(project.lines("step")))
        say(f"first step {project.lines('step')[0]['time'] - began:.1f} s after `up`, images there")
        yield project
    finally:
        project.remove()


def test_images_without_torch(host: DockerHost, say: Say) -> None:
    for tag, size in docker_images.sizes(host).items():
        say(f"{tag}: {size / 1e6:.0f} MB")
        image = tag.format("VERSION").replace("VERSION", docker_images.VERSION)
        found = host.docker("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", HAS_TORCH)
        assert found.strip() == str("policy" in tag or "rollout" in tag), tag


def test_run_answers_an_operator(run: Project) -> None:
    status = run.compose("run", "--rm", "cli", "status")
    assert all(name in status for name in ("policy-0", "reward-0", "rollout-0", "rollout-1")), status
    config = json.loads(run.compose("config", "--format", "json"))
    assert all(not service.get("cap_add") for name, service in config["services"].items() if name != "prepare")


def test_run_goes_on_when_a_rollout_is_killed(run: Project, say: Say) -> None:
    killed_at, victim = time.time(), run.containers("rollout")[0]
    run.host.kill(victim)
    run.waits("the rollout is back", lambda: joined(run, victim, killed_at))
    say(f"a killed rollout is back after {time.time() - killed_at:.0f} s, at step {run.advances()}")


def test_run_takes_a_rollout_that_is_added(run: Project, say: Say) -> None:
    before, added_at = set(run.containers("rollout")), time.time()
    run.compose("--profile", "cpu", "up", "--detach", "--no-recreate", "--scale", "rollout=3")
    after = set(run.containers("rollout"))
    assert before < after
    assert len(after) == 3
    (added,) = after - before
    run.waits("the added rollout joins", lambda: joined(run, added, added_at))
    (line,) = [line for line in run.lines("joined", added_at) if line["host"] == added[:12]]
    assert line["replica"] == "rollout-2", "it takes the first name that no other container holds"
    say(f"an added rollout is there after {time.time() - added_at:.0f} s, at step {run.advances()}")


def test_run_goes_on_when_the_controller_is_killed(run: Project, say: Say) -> None:
    before, killed_at = run.step(), time.time()
    run.host.kill(run.containers("controller")[0])
    line = run.says("controller", r"taken_up .*incarnation=2 ")
    assert version(line) >= before, "no committed step is lost"
    say(f"a killed controller is back: {line}, at step {run.advances()} {time.time() - killed_at:.0f} s later")


def test_run_goes_on_when_a_rollout_is_cut_off(run: Project, say: Say) -> None:
    cut_at, victim, network = time.time(), run.containers("rollout")[0], f"{run.name}_default"
    (name,) = {line["replica"] for line in run.lines("joined") if line["host"] == victim[:12]}
    run.host.docker("network", "disconnect", network, victim)
    run.waits("it has left", lambda: any(line["replica"] == name for line in run.lines("left", cut_at)))
    say(f"a rollout that is cut off has left after {time.time() - cut_at:.0f} s; step {run.advances()}")
    connected_at = time.time()
    run.host.docker("network", "connect", "--alias", "rollout", network, victim)
    run.waits("it is back", lambda: joined(run, victim, connected_at))
    restarts = run.host.docker("inspect", "--format", "{{.RestartCount}}", victim).strip()
    back_s = time.time() - connected_at
    say(f"it is back {back_s:.0f} s after its network, with {restarts} restarts, at step {run.advances()}")


def test_run_is_resumed_after_down_and_up(run: Project, say: Say) -> None:
    run.compose("--profile", "cpu", "down")
    assert run.states() == {}
    before, began = run.step(), time.time()
    run.compose("--profile", "cpu", "up", "--detach", "--wait")
    line = run.says("controller", "taken_up ")
    assert version(line) >= before
    run.waits("a further step", lambda: bool(run.lines("step", began)))
    first = run.lines("step", began)[0]
    assert first["step"] == version(line) + 1, "it goes on with the next step"
    say(f"down at step {before}; {line}; step {first['step']} {first['time'] - began:.1f} s after `up`")


def test_run_learns_and_stops(run: Project, say: Say) -> None:
    """The reward of training reaches its target, and `stop controller` ends all services with a checkpoint."""

    def rewards() -> list[float]:
        return [line["reward_mean"] for line in run.lines("step") if "reward_mean" in line]

    def recent() -> float:
        return sum(rewards()[-10:]) / 10

    run.waits(f"a reward of {TARGET_REWARD}", lambda: recent() >= TARGET_REWARD)
    say(f"reward {sum(rewards()[:10]) / 10:.2f} at first, {recent():.2f} at step {run.step()}")
    run.compose("stop", "controller")
    run.waits("all services end", lambda: all(state == "exited" for state, _ in run.states().values()))
    assert {name: code for name, (_, code) in run.states().items() if code} == {}, run.diagnosis()
    (checkpoint,) = run.lines("checkpoint")[-1:]
    exported = run.host.volume(f"{run.name}_checkpoints") / Path(checkpoint["path"]).relative_to("/var/lib/starling")
    assert (exported / "model.safetensors").is_file()


def joined(run: Project, container: str, after: float) -> bool:
    return any(line["host"] == container[:12] for line in run.lines("joined", after))


def version(line: str) -> int:
    (number,) = [int(word.removeprefix("version=")) for word in line.split() if word.startswith("version=")]
    return number


@pytest.fixture(scope="module")
def controller(host: DockerHost, folder: Path, say: Say) -> Iterator[Project]:
    """Yield a project whose controller waits for replicas."""
    project = Project(host, "controller", folder, RECIPE="small.toml")
    try:
        project.prepare()
        project.change(WAITING)
        project.compose("up", "--detach", "--wait", "controller")
        yield project
    finally:
        project.remove()


WAITING = {"services": {"controller": {"environment": {"STARLING_CONTROLLER__START_S": str(24 * HOUR_S)}}}}


def with_reward(change: dict[str, Any], **further: Any) -> dict[str, Any]:
    """Return the override of a reward service that fails once, and stays so."""
    return {"services": {**WAITING["services"], "reward": {"restart": "no", **change}}, **further}


def test_idle_controller_takes_little_memory(controller: Project, say: Say) -> None:
    (container,) = controller.containers("controller")
    pss, charged = memory_mib(container, controller.host)
    say(f"a controller that waits for replicas: {pss:.0f} MiB (PSS), {charged:.0f} MiB charged to its control group")
    assert 0 < pss < 200


def fails(project: Project, service: str, change: dict[str, Any], text: str, code: int) -> str:
    """Start a service with a fault; return the only line of its log that says why it ends."""
    project.change(change)
    project.compose("up", "--detach", "--no-deps", "--force-recreate", service)
    container = f"{project.name}-{service}-1"
    project.waits(f"{service} ends", lambda: project.states()[container][0] == "exited")
    lines = [line for line in project.log(service).splitlines() if "[info " not in line and "[warning " not in line]
    assert len(lines) == 1, project.log(service)
    assert re.search(text, lines[0]), project.log(service)
    assert project.states()[container][1] == code
    return lines[0]


def test_key_of_another_name_is_named(controller: Project, say: Say) -> None:
    change = with_reward({}, secrets={"reward-0": {"file": str(controller.run / "keys/rollout-0.json")}})
    say(
        fails(
            controller, "reward", change, "was made for rollout-0, not for reward-0; give --key or --name to match", 2
        )
    )


def test_key_of_another_run_is_named(controller: Project, folder: Path, say: Say) -> None:
    other = Project(controller.host, "other", folder, RECIPE="small.toml")
    other.prepare()
    patience = {"environment": {"STARLING_NETWORK__CONNECT_S": "45"}}  # a restarting controller looks alike for 30 s
    change = with_reward(patience, secrets={"reward-0": {"file": str(other.run / "keys/reward-0.json")}})
    text = "does not prove to reward-0 that it has the key .*, or .*; use the key file that was made for this name in"
    say(fails(controller, "reward", change, text, 1))
    other.remove()


def test_other_version_is_named(controller: Project, folder: Path, say: Say) -> None:
    source = (ROOT / "libs/common/starling/common/wire/structs.py").read_text()
    assert source.count("PROTOCOL_VERSION = 1\n") == 1
    (folder / "structs.py").write_text(source.replace("PROTOCOL_VERSION = 1\n", "PROTOCOL_VERSION = 2\n"))
    mounted = f"{folder}/structs.py:{SITE_PACKAGES}/starling/common/wire/structs.py:ro"
    text = "it speaks version 2 of the protocol, and the controller version 1; install the same version of Starling"
    say(fails(controller, "reward", with_reward({"volumes": [mounted]}), text, 1))


def test_read_only_journal_is_named(controller: Project, say: Say) -> None:
    change = {"restart": "no", "volumes": ["journal:/var/lib/starling:ro"]}
    say(
        fails(
            controller,
            "controller",
            {"services": {"controller": change}},
            "cannot open .*; the journal needs a writable",
            2,
        )
    )


def test_full_journal_is_named_at_the_start(controller: Project, say: Say) -> None:
    change = {"restart": "no", "volumes": ["full:/var/lib/starling"]}
    changes = {"services": {"controller": change}, "volumes": {"full": owned_by_service("16k")}}
    say(fails(controller, "controller", changes, "; free some space, and start the run again", 75))


def test_run_with_a_wrong_clock_waits_for_space(host: DockerHost, folder: Path, say: Say) -> None:
    """A rollout's clock is an hour ahead; the disks of states and of the journal become full, and have space again."""
    project = Project(host, "faults", folder, RECIPE="small.toml", ROLLOUTS="1")
    volumes = {name: owned_by_service("128m") for name in ("journal", "checkpoints")}
    try:
        project.prepare()
        project.change({"services": {"rollout": an_hour_ahead(folder)}, "volumes": volumes})
        project.compose("--profile", "cpu", "up", "--detach")
        say(project.says("controller", r"clock_skew .*the clock of rollout-0 is 3600 s ahead of .*; set both by NTP"))
        project.advances()

        fill(project, "policy")
        say(project.says("controller", r"failed .*cannot be written .*No space left on device.*free space"))
        freed_at = time.time()
        free(project, "policy")
        project.waits("a state is saved", lambda: bool(project.lines("state", freed_at)))

        fill(project, "controller")
        say(project.says("controller", "journal_full .*the disk of the journal .* is full; free some space"))
        free(project, "controller")
        project.says("controller", "journal_has_space")
        say(f"goes on, at step {project.advances()}")
    finally:
        project.remove()


def an_hour_ahead(folder: Path) -> dict[str, Any]:
    """Return what a service needs for a clock that is an hour ahead."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build the preloaded clock")
    source = ROOT / "tests/system/chaos/wall_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", folder / "clock.so", source], check=True, timeout=60)
    (folder / "clock.offset").write_bytes((HOUR_S * 10**9).to_bytes(8, "little"))
    files = [f"{folder}/{name}:/opt/{name}:ro" for name in ("clock.so", "clock.offset")]
    return {"volumes": files, "environment": {"LD_PRELOAD": "/opt/clock.so", "WALL_CLOCK_OFFSET": "/opt/clock.offset"}}


def fill(project: Project, service: str) -> None:
    done = project.compose("exec", service, "sh", "-c", "cat /dev/zero > /var/lib/starling/ballast", check=False)
    assert "No space left" in done, done


def free(project: Project, service: str) -> None:
    project.compose("exec", service, "rm", "/var/lib/starling/ballast")


def test_read_only_states_are_named(host: DockerHost, folder: Path, say: Say) -> None:
    """The policy ends at its start, and the controller says why."""
    project = Project(host, "states", folder, RECIPE="small.toml", ROLLOUTS="1")
    try:
        project.prepare()
        project.change({"services": {"policy": {"volumes": ["checkpoints:/var/lib/starling:ro"]}}})
        project.compose("--profile", "cpu", "up", "--detach")
        reason = r"the folder of states and checkpoints .* cannot be written \(Read-only file system\); make its volume"
        say(project.says("policy", f"starling policy-0: {reason}"))
        say(project.says("controller", f"replica_fault .*{reason}"))
    finally:
        project.remove()


def test_reward_service_alone(host: DockerHost, folder: Path, say: Say) -> None:
    """It serves by the image without torch, refuses a request without its token, and is back when it was killed."""
    project = Project(host, "reward", folder, REWARD_ADDRESS="127.0.0.1:18080")
    try:
        project.prepare()
        project.compose("--profile", "reward", "up", "--detach", "--wait")
        assert http(host, "/healthz") == 200
        assert http(host, "/v1/scorers") == 401
        token = (project.run / "keys/reward-token").read_text()
        assert http(host, "/v1/scorers", token) == 200
        (container,) = project.containers("reward-http")
        host.kill(container)
        restarts = ("inspect", "--format", "{{.RestartCount}}", container)
        project.waits("Docker starts it again", lambda: host.docker(*restarts).strip() == "1")
        project.waits("it serves again", lambda: http(host, "/v1/scorers", token) == 200)
        say("the reward service alone serves, also after SIGKILL")
    finally:
        project.remove()


def http(host: DockerHost, path: str, token: str = "") -> int:
    """Return the status of an answer of the published port; 0 without one."""
    header = ("--header", f"authorization: Bearer {token}") if token else ()
    write = ("--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--max-time", "30")
    return int(host.inside("curl", *write, *header, f"http://127.0.0.1:18080{path}", check=False) or 0)
