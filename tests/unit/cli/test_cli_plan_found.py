"""`starling plan --topology found`: plans for the machine that it is started on."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from system_tree import dgx, laptop

from starling.cli.main import main
from starling.cli.plan.forecast import forecast_sync, found_text
from starling.common.errors import ConfigError
from starling.weightsync.layouts.presets import PRESETS
from starling.weightsync.places.machine import find_machine

MODEL = "qwen3-8b"


def test_ranks_are_placed_on_the_gpus_that_were_found(tmp_path: Path) -> None:
    machine = find_machine(dgx(tmp_path).root, host="dgx-1", switch="leaf-3")
    forecast = forecast_sync("fsdp4", "tp4", config=PRESETS[MODEL], machine=machine)
    places = [*forecast.source.places, *forecast.destination.places]
    assert [place.device for place in places] == [gpu.uuid for gpu in machine.gpus]
    moved = {name for name, num_bytes in forecast.estimate.link_bytes.items() if num_bytes}
    assert moved == {"host"}, "the first four GPUs are on one node, the others on the other"
    text = found_text(machine)
    assert "host           dgx-1" in text
    assert "leaf-3" in text
    assert text.count("GPU-") == 8


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    machine = find_machine(dgx(tmp_path).root, host="dgx-1", switch="")
    with pytest.raises(ConfigError, match="has 8 GPUs, but 'fsdp8' and 'tp4' need 12"):
        forecast_sync("fsdp8", "tp4", config=PRESETS[MODEL], machine=machine)


def test_all_ranks_share_the_processor_of_a_machine_without_gpus(tmp_path: Path) -> None:
    machine = find_machine(laptop(tmp_path).root, host="h", switch="")
    forecast = forecast_sync("fsdp4", "tp2 x3", config=PRESETS[MODEL], machine=machine)
    assert {name for name, num_bytes in forecast.estimate.link_bytes.items() if num_bytes} == {"device"}
    assert "GPUs           none" in found_text(machine)


def test_command_shows_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "fsdp1", "tp1", "--model", MODEL, "--topology", "found"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"host           {socket.gethostname()}\n")
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"]["host"] == socket.gethostname()
