"""`starling deploy systemd`: what it installs, that it is idempotent, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from starling.cli.main import main

CONTROLLER = ("--controller", "tcp://10.0.0.1:5555")
PROGRAM = ("--program", "/opt/starling/bin/starling")


def deploy(root: Path, role: str, *flags: str) -> int:
    return main(["deploy", "systemd", "--role", role, "--root", str(root), *PROGRAM, *flags])


def files(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_rollout_with_its_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(tmp_path, "rollout", "--gpus", "0,1", *CONTROLLER) == 0
    installed = files(tmp_path)
    assert sorted(installed) == [
        "etc/starling/rollout-0.env",
        "etc/systemd/system/starling-rollout@.service",
        "etc/systemd/system/starling.target",
        "etc/sysusers.d/starling.conf",
    ]
    environment = installed["etc/starling/rollout-0.env"].splitlines()
    assert {"CUDA_VISIBLE_DEVICES=0,1", "CONTROLLER=tcp://10.0.0.1:5555"} <= set(environment)
    assert "systemctl enable --now starling-rollout@0.service starling.target" in capsys.readouterr().out


def test_rollout_that_joins_needs_its_key_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(tmp_path, "rollout", "--join", "--number", "3", *CONTROLLER) == 0
    drop_in = files(tmp_path)["etc/systemd/system/starling-rollout@3.service.d/join.conf"].splitlines()
    assert drop_in[2:] == [
        "ExecStart=",
        "ExecStart=/opt/starling/bin/starling join ${CONTROLLER} --role rollout --name rollout-3 "
        "--key /var/lib/starling/keys/rollout-3.json --dir /var/lib/starling/rollout-3 --replace --timeout 600 $FLAGS",
    ]
    environment = files(tmp_path)["etc/starling/rollout-3.env"]
    assert "CONTROLLER=tcp://10.0.0.1:5555" in environment
    assert "CONFIG=" not in environment
    said = capsys.readouterr().out
    assert "copy keys/rollout-3.json of the controller's folder to /var/lib/starling/keys" in said
    assert "config.toml" not in said
    assert deploy(tmp_path, "rollout", "--number", "3", *CONTROLLER) == 2
    assert "rollout-3 joins by its key; repeat --join, or remove" in capsys.readouterr().err


def test_reward_that_joins_needs_its_key_alone(tmp_path: Path) -> None:
    assert deploy(tmp_path, "reward", "--join", *CONTROLLER) == 0
    drop_in = files(tmp_path)["etc/systemd/system/starling-reward.service.d/join.conf"]
    folder = "/var/lib/starling-reward"
    assert f"--name reward-0 --key {folder}/keys/reward-0.json --dir {folder}/reward-0 --replace" in drop_in
    environment = files(tmp_path)["etc/starling/reward.env"].splitlines()
    assert {"CONTROLLER=tcp://10.0.0.1:5555", "FLAGS="} <= set(environment)


@pytest.mark.parametrize("join", [(), ("--join",)])
def test_reward_services_of_two_machines_have_names_of_their_own(
    join: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, unit = [], "etc/systemd/system/starling-reward.service"
    for machine, flags in (("a", ()), ("b", ("--number", "1")), ("b", ())):  # the number stays when it is repeated
        root = tmp_path / machine
        assert deploy(root, "reward", *join, *flags, *CONTROLLER) == 0
        written = files(root)
        started = written[f"{unit}.d/join.conf" if join else unit]
        (command,) = [line for line in started.splitlines() if line.startswith("ExecStart=/")]
        (name,) = re.findall(r" --name (\S+) ", command)
        assert (f"/keys/{name}.json" in command) == bool(join)
        assert f"# copy keys/{name}.json of the controller's folder" in capsys.readouterr().out
        names.append(name)
    assert names == ["reward-0", "reward-1", "reward-1"]


def test_reward_that_was_installed_without_join_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its environment file is kept, and does not say where to join."""
    assert deploy(tmp_path, "reward", *CONTROLLER) == 0
    before, path = files(tmp_path), tmp_path / "etc/starling/reward.env"
    assert deploy(tmp_path, "reward", "--join", *CONTROLLER) == 2
    assert (
        f"{path} was made without --join: it has no line CONTROLLER=tcp://10.0.0.1:5555, without which the unit cannot "
        "start; remove the file, and repeat the command"
    ) in capsys.readouterr().err
    assert files(tmp_path) == before
    path.unlink()
    assert deploy(tmp_path, "reward", "--join", *CONTROLLER) == 0
    assert deploy(tmp_path, "reward", "--join", *CONTROLLER) == 0


def test_repeated_command_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy(tmp_path, "rollout", "--gpus", "0,1", *CONTROLLER)
    before, _ = files(tmp_path), capsys.readouterr()
    assert deploy(tmp_path, "rollout", "--gpus", "0,1", *CONTROLLER) == 0
    assert files(tmp_path) == before
    assert "written" not in capsys.readouterr().out


def test_other_gpus_are_another_instance(tmp_path: Path) -> None:
    for gpus in ("0,1", "2,3", "0,1"):
        deploy(tmp_path, "rollout", "--gpus", gpus, *CONTROLLER)
    deploy(tmp_path, "rollout", "--gpus", "4", "--number", "12", *CONTROLLER)
    names = sorted(path.name for path in (tmp_path / "etc/starling").iterdir())
    assert names == ["rollout-0.env", "rollout-1.env", "rollout-12.env"]


def test_edited_environment_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy(tmp_path, "reward")
    path = tmp_path / "etc/starling/reward.env"
    path.write_text(path.read_text() + "STARLING_REWARD__NUM_WORKERS=8\n")
    assert deploy(tmp_path, "reward") == 0
    assert path.read_text().endswith("STARLING_REWARD__NUM_WORKERS=8\n")
    assert "kept as it is" in capsys.readouterr().out


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(tmp_path, "policy", "--dry-run", *CONTROLLER) == 0
    assert files(tmp_path) == {}
    assert "ExecStart=/opt/starling/bin/starling policy --name policy-%i" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("role", "flags", "reason"),
    [
        ("rollout", (), "--controller is missing"),
        ("rollout", ("--controller", "10.0.0.1:5555"), "--controller 10.0.0.1:5555 is not an address"),
        ("rollout", ("--gpus", "all", *CONTROLLER), "--gpus all is no list of GPUs"),
        ("controller", ("--join",), "--join is for replicas"),
        ("reward", ("--join",), "--join needs the address to join at"),
        ("reward", ("--gpus", "0"), "--gpus 0 is for a policy or a rollout"),
        ("controller", ("--number", "1"), "--number 1 is for replicas"),
        ("controller", CONTROLLER, "remove it for the controller"),
        ("reward", ("--config", "recipe.toml"), "--config recipe.toml cannot stand in a unit"),
        ("reward", ("--config", "/etc/a b.toml"), "--config /etc/a b.toml cannot stand in a unit"),
        ("reward", ("--config", "/root/recipe.toml"), "in a folder that the services do not see"),
    ],
)
def test_what_cannot_work_is_refused(
    role: str, flags: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy(tmp_path, role, *flags) == 2
    assert reason in capsys.readouterr().err
    assert files(tmp_path) == {}


def test_folder_that_cannot_be_written_names_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etc").write_text("")
    assert deploy(tmp_path, "reward") == 2
    told = capsys.readouterr().err
    assert f"{tmp_path}/etc/systemd/system/starling-reward.service cannot be written: " in told
    assert "run the command as root, or give another --root" in told
