"""`starling join` before the service starts: keys, names, settings, GPUs and the model folder."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from starling.cli.join.joining import JoinRequest, prepare
from starling.common.errors import ConfigError, RefusedError
from starling.common.net.curve import load_allowed, load_key
from starling.common.net.hub import hub
from starling.common.net.hub.hub import Hub, HubKeys, ReceivedMessage
from starling.common.net.keyring import make_keys
from starling.common.net.link import ControllerLink
from starling.common.net.settings import LinkSettings
from starling.common.settings import load, read_toml
from starling.common.wire.messages import Hello, ModelFile, RoleSettings
from starling.rollout.settings import RolloutProcess

DEADLINE_S = 20.0


class RunningController:
    """A hub that answers requests for settings, polled by a thread, and replicas that are connected to it."""

    def __init__(self, keys: Path) -> None:
        own = HubKeys(load_key(keys / "controller.json"), load_allowed(keys), keys)
        self.hub = Hub("tcp://127.0.0.1:0", "one/1", 1, own)
        self.hub.settings_source = self.answer
        self.sections: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.asked: list[bool] = []
        self.joined: set[str] = set()
        self._keys = keys
        self._links: list[ControllerLink] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def answer(self, role: str, with_model: bool) -> tuple[RoleSettings, tuple[bytes, ...]]:
        """Return what the recipe of a test says."""
        self.asked.append(with_model)
        sent = self.files if with_model else {}
        files = [
            ModelFile(name=name, nbytes=len(data), digest=xxhash.xxh3_128(data).hexdigest())
            for name, data in sent.items()
        ]
        sections = {"run": {"id": "one/1"}, "model": {}, **self.sections}
        settings = RoleSettings(sections=sections, withheld=("rollout.api.key",), files=tuple(files))
        return settings, tuple(sent.values())

    def connect(self, name: str) -> None:
        """Connect a replica, and wait until the hub knows it."""
        key = load_key(self._keys / f"{name}.json")
        settings = LinkSettings(name=name, run="one/1", controller=self.hub.address, key=key)
        link = ControllerLink(settings, Hello(role="rollout", host="h", pid=1))
        self._links.append(link)
        link.start()
        deadline = time.monotonic() + DEADLINE_S
        while name not in self.joined:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        for link in self._links:
            link.close("the test is over")
        self._over.set()
        self._thread.join()
        self.hub.close(0.0)

    def _poll(self) -> None:
        while not self._over.is_set():
            for event in self.hub.poll(0.05):
                if isinstance(event, ReceivedMessage):
                    self.joined.add(event.envelope.sender)


Controlled = Callable[..., RunningController]
Requests = Callable[..., JoinRequest]


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RunningController]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(hub, "SETTINGS_EVERY_S", 0.0)
    make_keys(tmp_path / "keys", ["rollout-2", "rollout-10", "reward-0"])
    running = RunningController(tmp_path / "keys")
    yield running
    running.close()


@pytest.fixture
def controlled(controller: RunningController) -> Controlled:
    def make(**sections: dict[str, Any]) -> RunningController:
        controller.sections = sections
        return controller

    return make


@pytest.fixture
def request_of(controller: RunningController) -> Requests:
    def make(key: str | Path = "keys/rollout-2.json", **more: Any) -> JoinRequest:
        return JoinRequest(**{"controller": controller.hub.address, "role": "rollout", "key": Path(key), **more})

    return make


def test_settings_of_the_run_are_those_of_the_service(
    controlled: Controlled, request_of: Requests, tmp_path: Path
) -> None:
    address = controlled().hub.address
    controlled(rollout={"num_slots": 3, "vllm": {"speculative": {"method": "ngram"}}}, network={"lease_s": 7.0})
    made = prepare(request_of(settings=("rollout.max-rows=9",)))
    folder = tmp_path / "joined/rollout-2"
    common = ["starling.rollout.shell.main", "--config", str(folder / "config.toml"), "--dir", str(folder)]
    common += ["--name", "rollout-2", "--controller", address, "--key", str(tmp_path / "keys/rollout-2.json")]
    assert list(made.command) == [*common, "--rollout.max-rows=9"]
    settings = load(RolloutProcess, [folder / "config.toml"], [made.command[-1]])
    assert (settings.run.id, settings.network.lease_s, settings.network.host) == ("one/1", 7.0, "127.0.0.1")
    assert (settings.rollout.num_slots, settings.rollout.max_rows) == (3, 9)
    assert made.notes == (
        f"rollout-2 joins the run one/1 at {address}; its files: {folder}",
        "the controller keeps rollout.api.key to itself: if this replica needs it, give it with --set or --config",
    )
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_folder_of_keys_gives_the_first_free_name_of_the_role(controlled: Controlled, request_of: Requests) -> None:
    controller = controlled()
    controller.connect("rollout-2")
    assert "rollout-10" in prepare(request_of("keys")).command
    controller.connect("rollout-10")
    with pytest.raises(RefusedError, match=r"rollout-2, rollout-10 are connected to this run already; make a key"):
        prepare(request_of("keys"))


def test_key_of_a_process_that_starts_at_the_same_time_is_left_to_it(
    controlled: Controlled, request_of: Requests, tmp_path: Path
) -> None:
    controlled()
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    command = [sys.executable, "-c", hold, str(tmp_path / "keys/rollout-2.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert "rollout-10" in prepare(request_of("keys")).command
        other.communicate("\n", timeout=60)


def test_name_in_use_is_refused_unless_it_is_replaced(controlled: Controlled, request_of: Requests) -> None:
    controlled().connect("rollout-2")
    with pytest.raises(RefusedError, match=r"rollout-2 is connected to this run already"):
        prepare(request_of())
    assert "rollout-2" in prepare(request_of(replaces=True)).command


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"controller": "10.0.0.1:5555"}, "'10.0.0.1:5555' is not the address of a controller; write tcp://HOST:PORT"),
        ({"controller": "tcp://host:99999"}, "is not the address of a controller"),
        ({"role": "reward"}, "was made for rollout-2, which is no reward; give --role to match"),
        ({"name": "rollout-3"}, "was made for rollout-2, not for rollout-3; give the right key, or leave --name out"),
        ({"name": "reward-3"}, "--name reward-3 is not the name of a rollout; write rollout-NUMBER"),
        ({"key": Path("keys/rollout-9.json")}, "the key file keys/rollout-9.json cannot be read"),
        ({"key": Path("keys"), "role": "teacher"}, "keys has no key of a teacher; make one where the run is"),
        ({"settings": ("max_rows=3",)}, "--set max_rows=3 is no setting; write --set SECTION.KEY=VALUE"),
        ({"num_gpus": -1}, "--gpus -1 is no number of GPUs"),
        ({"num_gpus": 5}, "--gpus 5 is more than the 4 GPUs visible here; give at most 4"),
        ({"timeout_s": 0.0}, "--timeout 0 is not a number of seconds"),
        ({"folder": Path("/dev/null/a")}, "the folder /dev/null/a cannot be written"),
    ],
)
def test_mistake_is_one_sentence(
    controlled: Controlled, request_of: Requests, change: dict[str, Any], text: str
) -> None:
    controlled()
    with pytest.raises(ConfigError) as raised:
        prepare(request_of(**change))
    assert text in str(raised.value)


def test_gpus_are_the_first_visible_ones_and_the_workers_of_vllm(controlled: Controlled, request_of: Requests) -> None:
    controlled(rollout={"engine": "vllm"})
    made = prepare(request_of(num_gpus=2))
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert made.command[-1] == "--rollout.vllm.tensor-parallel-size=2"
    own = prepare(request_of(num_gpus=2, settings=("rollout.vllm.tensor_parallel_size=1",)))
    assert own.command[-1] == "--rollout.vllm.tensor-parallel-size=1"
    controlled(rollout={"engine": "transformers"})
    assert "tensor" not in " ".join(prepare(request_of(num_gpus=2)).command)


def test_stages_of_vllm_share_the_gpus(controlled: Controlled, request_of: Requests) -> None:
    controlled(rollout={"engine": "vllm", "vllm": {"pipeline_parallel_size": 2}})
    assert prepare(request_of(num_gpus=4)).command[-1] == "--rollout.vllm.tensor-parallel-size=2"
    with pytest.raises(ConfigError, match=r"--gpus 3 cannot be shared by the 2 stages"):
        prepare(request_of(num_gpus=3))


def test_missing_model_folder_comes_from_the_controller(
    controlled: Controlled, request_of: Requests, tmp_path: Path
) -> None:
    controller = controlled(model={"path": "/only/there"})
    controller.files = {"config.json": b"{}", "tokenizer.json": json.dumps({"a": 1}).encode()}
    made = prepare(request_of())
    model = tmp_path / "joined/rollout-2/model"
    assert read_toml(tmp_path / "joined/rollout-2/config.toml")["model"] == {"path": str(model)}
    assert {path.name: path.read_bytes() for path in model.iterdir()} == controller.files
    assert made.notes[-1] == f"{model} has 2 files of the model, 0 KiB; weights are pulled"
    assert set(controller.asked) == {False, True}


@pytest.mark.parametrize(
    ("sections", "change", "text"),
    [
        ({"rollout": {"load_weights": True}}, {}, "reads weights from it; copy it here"),
        ({"model": {"path": "/only/there", "lora": {}}}, {}, "reads weights from it; copy it here"),
        (
            {"model": {"path": "/only/there", "trust_remote_code": True}},
            {},
            "its code (model.trust_remote_code) is not",
        ),
        ({}, {}, "the controller cannot send its small files (it sent no config.json); copy it here"),
    ],
)
def test_model_that_is_missing_is_named(
    controlled: Controlled, request_of: Requests, sections: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    controlled(**{"model": {"path": "/only/there"}, **sections})
    with pytest.raises(ConfigError) as raised:
        prepare(request_of(**change))
    assert "the model folder /only/there of the run is not on this machine" in str(raised.value)
    assert text in str(raised.value)


def test_model_folder_of_this_machine_is_taken_as_it_is_given(controlled: Controlled, request_of: Requests) -> None:
    controller = controlled(model={"path": "/only/there"})
    assert "--model.path=/here" in prepare(request_of(settings=("model.path=/here",))).command
    assert True not in controller.asked
