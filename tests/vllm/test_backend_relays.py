"""Engines of vLLM that relay a trainer's weights to each other, and one that is killed while it does.

Each engine runs in a process of its own; the trainer is the test.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import checkpoint, read_model
from fault_pair import with_address
from test_backend_engine import DEADLINE_S, PROMPT, engine
from warm import process_context

from starling.weightsync.vllm.backend.clients import LocalEngine
from starling.weightsync.vllm.backend.sender import SenderOptions, WeightSender

NUM_ENGINES = 3
NUM_TOKENS = 12
KILLED_AT = 0.6
"""Part of a version that the first engine gets before it is killed."""


def serve(folder: Path, pipe: Connection) -> None:
    """Be an engine: answer calls of an `EngineProcess`."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0", GLOO_SOCKET_IFNAME="lo")
    try:
        llm = engine(folder)
        others: dict[str, Any] = {"sample": lambda: sample(llm), "num_arrived": lambda: num_arrived(llm)}
        client = LocalEngine(llm)
        pipe.send((None, ""))
        while True:
            name, arguments = pipe.recv()
            call = others.get(name) or getattr(client, name)
            pipe.send((call(*arguments), ""))
    except EOFError:
        pass
    except BaseException:  # noqa: BLE001 - the test shows it
        pipe.send((None, traceback.format_exc()))
    os._exit(0)  # threads of vLLM must not keep the process alive


def sample(llm: Any) -> tuple[list[int], list[str]]:
    """Sample greedily; return the tokens, and the versions that computed them."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, detokenize=False, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    (output,) = answer.outputs
    return list(output.token_ids), [span.version for span in output.weight_versions]


def num_arrived(llm: Any) -> int:
    """Return how many buckets of its pull a worker has."""
    (found,) = llm.collective_rpc(lambda worker: len(worker.weight_transfer_engine._session._weights._puller._sent))
    return int(found)


class EngineProcess:
    """An engine of vLLM in a process of its own."""

    def __init__(self, folder: Path) -> None:
        context: Any = process_context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(folder, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, name: str, *arguments: Any) -> None:
        """Begin a call."""
        self._pipe.send((name, arguments))

    def end(self) -> Any:
        """Return its result."""
        assert self._pipe.poll(DEADLINE_S), f"no answer within {DEADLINE_S:g} s"
        result, error = self._pipe.recv()
        assert not error, error
        return result

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.process.kill()
        self.process.join()


class Engines:
    """The client of several engines."""

    def __init__(self, folder: Path) -> None:
        self.engines = [EngineProcess(folder) for _ in range(NUM_ENGINES)]
        for one in self.engines:
            one.end()

    def all(self, name: str, *arguments: Any) -> list[Any]:
        """Call all engines at once; return their results."""
        for one in self.engines:
            one.begin(name, *arguments)
        return [one.end() for one in self.engines]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every worker join the trainer."""
        self.all("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Begin an update."""
        self.all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have every worker switch."""
        self.all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update."""
        self.all("finish_weight_update", weight_version)


class Gate:
    """TCP proxy in front of a trainer, which calls `act` once, when it has forwarded so many bytes.

    Nothing is forwarded meanwhile.
    """

    def __init__(self, address: str, at: int, act: Callable[[], None]) -> None:
        host, _, port = address.rpartition(":")
        self._target, self._at, self._act = (host, int(port)), at, act
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.num_bytes = 0
        """What the trainer has sent."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                reader, _ = self._listener.accept()
                source = socket.create_connection(self._target)
                for ends in ((reader, source, False), (source, reader, True)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, end: socket.socket, other: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := end.recv(1 << 16):
                if counts:
                    self._count(len(data))
                other.sendall(data)
        for one in (end, other):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            before, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
            if before < self._at <= self.num_bytes:
                self._act()

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoint that the engines start with, and one with other weights."""
    base = tmp_path_factory.mktemp("relays")
    return [checkpoint(base / str(seed), "qwen3 of 26 MB", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engines(folders: list[Path]) -> Iterator[Engines]:
    """Engines that hold the first checkpoint."""
    made = Engines(folders[0])
    everyone = list(made.engines)
    yield made
    for one in everyone:
        one.kill()


@contextmanager
def sending(model: Any, engines: Engines, **options: Any) -> Iterator[WeightSender]:
    """Make a sender whose engines relay, have them join, and close it afterwards."""
    sender = WeightSender(model, engines, options=SenderOptions(relay_from_mb=1.0, deadline_s=DEADLINE_S, **options))
    try:
        sender.join()
        yield sender
    finally:
        sender.close()


def check_tokens(engines: Engines, model: Any, version: int) -> None:
    """Sample with all engines; compare with transformers, and the label of the tokens."""
    greedy = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    wanted = model.generate(torch.tensor([PROMPT]), **greedy)[0, len(PROMPT) :].tolist()
    assert engines.all("sample") == [(wanted, [str(version)])] * len(engines.engines)


def size_of(model: Any) -> int:
    """Return the size of a model, in bytes."""
    return sum(parameter.nbytes for parameter in model.parameters())


def change(model: Any) -> None:
    """Train."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.mark.campaign
def test_engines_relay_what_the_trainer_sends_once(engines: Engines, folders: list[Path]) -> None:
    model = read_model(folders[1])
    with sending(model, engines) as sender:
        for version in (1, 2):
            assert sender.send() == version
            check_tokens(engines, model, version)
            assert sender.report is not None
            assert sender._staged is not None
            trainer = sender._staged.ranks[0].address
            read = [report.bytes_by_source for report in sender.report.pulls.values()]
            assert sum(sizes.get(trainer, 0) for sizes in read) <= 1.1 * size_of(model)
            assert sum(sum(sizes.values()) for sizes in read) >= len(engines.engines) * size_of(model)
            change(model)


@pytest.mark.campaign
def test_relay_that_is_killed_costs_the_others_a_bucket(
    engines: Engines, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_model(folders[0])
    change(model)
    with sending(model, engines, transport="tcp") as sender:
        sender.send()
        check_tokens(engines, model, 1)
        change(model)
        assert sender._staged is not None
        assert sender._rendezvous is not None
        assert sender._publisher is not None
        assert sender.report is not None
        num_buckets = next(iter(sender.report.pulls.values())).num_buckets
        names = [worker.name for worker in sender._rendezvous.workers]
        chain = [engine_of(name, engines) for name in names]
        num_arrived_before = 0

        def kill() -> None:
            nonlocal num_arrived_before
            num_arrived_before = wait_until_equal(chain[:2], int(KILLED_AT * num_buckets) - 2)
            chain[0].kill()
            engines.engines.remove(chain[0])

        gate = Gate(sender._staged.ranks[0].address, int(KILLED_AT * size_of(model)), kill)
        snapshot = sender._publisher.snapshot

        def offered_through_gate(*arguments: Any) -> Any:
            made = snapshot(*arguments)
            offer = made.offer
            monkeypatch.setattr(made, "offer", lambda: with_address(offer(), gate.address))
            return made

        with monkeypatch.context() as patch:
            patch.setattr(sender._publisher, "snapshot", offered_through_gate)
            sender.stage()
        gate.close()
        report = sender.report
        assert report is not None
        assert list(report.lost) == names[:1]
        second, third = (report.pulls[name] for name in names[1:])
        assert 0 < num_arrived_before < second.num_buckets, "not killed in mid-transfer"
        bucket = size_of(model) / second.num_buckets
        assert gate.num_bytes <= size_of(model) + 2 * bucket, "more than a bucket was sent twice"
        assert second.bytes_by_source[gate.address] <= size_of(model) - (num_arrived_before - 1) * bucket
        assert gate.address not in third.bytes_by_source, "who is behind the reader reads from it as before"
        sender.switch()
        check_tokens(engines, model, 2)
        change(model)
        sender.send()
        check_tokens(engines, model, 3)


def engine_of(worker: str, engines: Engines) -> EngineProcess:
    """Return the engine of a worker, whose name has the number of its process."""
    found = re.search(r":(\d+)-", worker)
    assert found
    return next(one for one in engines.engines if one.process.pid == int(found[1]))


def wait_until_equal(pair: list[EngineProcess], least: int) -> int:
    """Wait until a relay has so many buckets, and its reader the same; return how many."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        for one in pair:
            one.begin("num_arrived")
        first, second = (one.end() for one in pair)
        if least <= first == second:
            return int(first)
    raise AssertionError("the reader of a relay does not get what the relay has")
