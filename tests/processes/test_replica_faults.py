"""Mistakes of an installation at rollouts: each is one clear line in a log, and one in the snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lone_controller import PATIENCE_S, lone_controller
from test_installation_faults import CLOCK, OTHER_VERSION, kind, last_line, with_controller_key

from starling.common.net.keyring import make_keys
from starling.common.observe.process import EXIT_FAILED

pytestmark = pytest.mark.system


def test_wrong_key_version_and_clock_of_rollouts_are_named(model: Path, tmp_path: Path) -> None:
    names = [f"rollout-{number}" for number in range(4)]
    with lone_controller(tmp_path / "run", *names) as controller:
        keys = controller.folder / "keys"
        make_keys(tmp_path / "others", [names[3]])
        theirs = json.loads((tmp_path / "others" / f"{names[3]}.json").read_text())
        own = json.loads((keys / f"{names[3]}.json").read_text())["controller_public"]
        unproven = with_controller_key(keys / f"{names[2]}.json", theirs["controller_public"], tmp_path / "unproven")
        unknown = with_controller_key(tmp_path / "others" / f"{names[3]}.json", own, tmp_path / "unknown")
        flags = [f"--model.path={model}"]
        _, ahead_log = controller.join("rollout", names[0], *flags, before=CLOCK)
        older, older_log = controller.join("rollout", names[1], *flags, before=OTHER_VERSION)
        assert older.wait(PATIENCE_S) == EXIT_FAILED
        assert last_line(older_log).startswith(
            f"starling {names[1]}: the controller refuses {names[1]}: it speaks version 7 of the protocol, and the "
        )
        lost, lost_log = controller.join("rollout", names[2], *flags, "--network.connect-s=60", key=unproven)
        refused, refused_log = controller.join("rollout", names[3], *flags, key=unknown)
        assert [process.wait(PATIENCE_S) for process in (refused, lost)] == [EXIT_FAILED, EXIT_FAILED]
        assert f"refuses the key of {names[3]}; use the key file that was made" in last_line(refused_log)
        sentence = (
            f"the controller at {controller.address()} does not prove to {names[2]} that it has the key "
            f"{theirs['controller_public']}, or something between them closes the connections; use the key file that "
            "was made for this name in this run, and check the address, and that the controller runs"
        )
        assert last_line(lost_log) == f"starling {names[2]}: {sentence} (no answer for 60 s)"
        early = [line for line in lost_log.read_text().splitlines() if "controller_unproven" in line]
        assert len(early) == 1, lost_log.read_text()
        assert sentence in early[0]
        snapshot = controller.wait_for_snapshot(lambda one: len(one.notices) == 4)
        assert {kind(text) for text in snapshot.notices} == {"controller key", "clock", "protocol", "key"}
        assert [one.name for one in snapshot.replicas] == [names[0]], ahead_log.read_text()
        log = controller.log.read_text().splitlines()
        for event in ("refused an unknown key", "speaks version 7", "clock_skew", "wrong_controller_key"):
            assert sum(event in line for line in log) == 1, log
