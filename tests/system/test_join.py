"""A rollout that joins a run from a place that has a key and nothing else; mistakes are one sentence each."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from system_runs import attempt, make_workdir, metrics, run, starling_command

import starling.common
from starling.common.net.keyring import make_keys
from starling.common.wire.messages import PROTOCOL_VERSION

pytestmark = pytest.mark.system

HIDING = 'mount -t tmpfs none "$0" && exec "$@"'
"""A shell's command that hides a folder and becomes another command."""
OTHER_VERSION = "from starling.common.wire import structs\nstructs.PROTOCOL_VERSION += 1\n"


def error_of(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return the only line of a `starling join` that fails."""
    with starling_command(
        folder, "join", *arguments, "--role", "rollout", name="mistake", environment=environment
    ) as command:
        assert command.wait() in (1, 2), command.transcript()
    [line] = command.errors.splitlines()
    return line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide the folder of the run")
def test_rollout_joins_with_a_key_and_nothing_else(tmp_path: Path) -> None:
    folder = make_workdir(
        tmp_path / "run", launch={"num_rollouts": 0}, controller={"num_rollouts": 1, "start_s": 900.0}
    )
    there = tmp_path / "there"
    there.mkdir()
    with run(folder) as job:
        home = attempt(folder)
        job.wait_until((home / "controller.json").exists, "the controller's address")
        address = json.loads((home / "controller.json").read_text())["address"]
        make_keys(home / "keys", ["rollout-0"])
        shutil.move(home / "keys/rollout-0.json", there / "key.json")
        make_keys(tmp_path / "others", ["rollout-0"])

        own = json.loads((there / "key.json").read_text())
        stranger = json.loads((tmp_path / "others/rollout-0.json").read_text())
        (there / "stranger.json").write_text(json.dumps({**stranger, "controller_public": own["controller_public"]}))
        (there / "stranger.json").chmod(0o600)
        (there / "sitecustomize.py").write_text(OTHER_VERSION)
        path = os.pathsep.join([str(there), os.environ.get("PYTHONPATH", "")])
        key = ["--key", "key.json"]
        refused = error_of(there, address, "--key", "stranger.json")
        assert refused.startswith(
            f"starling: the controller at {address} refuses the key of rollout-0; use the key file"
        )
        nobody = error_of(there, "tcp://127.0.0.1:9", *key, "--timeout", "2")
        assert "the controller at tcp://127.0.0.1:9 cannot be reached by rollout-0 (no answer for " in nobody
        newer = error_of(there, address, *key, environment={"PYTHONPATH": path})
        assert f"refuses rollout-0: it speaks version {PROTOCOL_VERSION + 1} of the protocol" in newer
        setting = ["--set", "rollout.num_slotz=3", "--dir", "wrong"]
        assert "unknown setting rollout.num_slotz" in error_of(there, address, *key, *setting)
        for name in ("stranger.json", "sitecustomize.py"):
            (there / name).unlink()

        hidden = ("unshare", "--mount", "sh", "-c", HIDING, str(folder))
        words = ["join", address, "--role", "rollout", *key, "--set", "rollout.num_slots=3"]
        with starling_command(there, *words, name="join", prefix=hidden) as joined:
            assert job.wait() == 0, job.transcript() + joined.transcript()
            assert joined.wait() == 0, joined.transcript()
    assert any(line["replica"] == "rollout-0" for line in metrics(folder, "adopted"))
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (there / "joined/rollout-0/model").iterdir()}
    assert not list(there.rglob("*.safetensors"))
    assert "rollout-0 joins the run tiny/attempt-1/" in joined.output
    assert str(folder) not in str(Path(starling.common.__file__ or "")), "the code is not what was hidden"
