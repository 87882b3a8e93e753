"""The place of a tensor on a GPU (`make test-gpu`)."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from starling.weightsync.places.gpus import read_nvlinks
from starling.weightsync.places.machine import find_machine
from starling.weightsync.tensors.modules import detect_place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU: not yet run here"),
]


def listed(*fields: str) -> list[list[str]]:
    """Return the fields of each GPU as `nvidia-smi` prints them."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("there is no nvidia-smi")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return [[field.strip() for field in line.split(",")] for line in lines]


def test_tensor_is_at_the_gpu_that_the_driver_names() -> None:
    place = detect_place([torch.zeros(1, device="cuda")])
    address = {uuid: pci.lower()[-12:] for uuid, pci in listed("uuid", "pci.bus_id")}
    assert address[place.device] == place.pci[-12:]


def test_nvlinks_are_between_gpus_of_this_machine() -> None:
    links = read_nvlinks()
    assert len(links) == len(listed("uuid"))
    machine = find_machine()
    assert all(peer in links and peer != pci for pci, peers in machine.nvlink.items() for peer in peers)
