"""Life cycle of a rollout's engine: interruption, sleep, loss and restart, and adoption in every mode."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_hub import DEADLINE_S, FakeHub
from msgspec.structs import replace
from replica_processes import SMALL, exit_code, replica

from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.wire import messages as wire
from starling.policy.train.model.load import load_model, version_tensors
from starling.weightsync.plan.layout import Layout, decode, encode
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.tensors.modules import layout_of

NAME = "rollout-0"
LONG = 1500
"""Tokens that take some seconds to sample. Greedy completions of these models never end by themselves."""
ENDLESS = 30_000
"""More tokens than can be sampled before the interruption."""
FRAGILE = '''
from pathlib import Path

from starling.rollout.engine.base import EngineLostError
from starling.rollout.engine.embedded.engine import transformers_engine

BREAK = Path(__file__).with_name("break")
KILL = Path(__file__).with_name("kill")


class Fragile:
    """The embedded engine, lost when the file `kill` appears, or when `break` appears during sampling; removes it."""

    def __init__(self, spec):
        self._engine, self._lost = transformers_engine(spec), False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    @property
    def ready(self):
        return KILL.exists() or self._lost or self._engine.ready

    def wake_up(self):
        self._check_files()
        self._engine.wake_up()

    def step(self):
        self._check_files()
        return self._engine.step()

    def _check_files(self):
        for file, counts in (KILL, True), (BREAK, self._engine.num_running):
            if counts and file.exists():
                file.unlink()
                self._lost = True
        if self._lost:
            raise EngineLostError("the test broke it")
'''
STUCK = '''
import threading

from starling.rollout.engine.embedded.engine import transformers_engine


class Stuck:
    """The embedded engine, which cannot sleep."""

    def __init__(self, spec):
        self._engine = transformers_engine(spec)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def sleep(self):
        threading.Event().wait(600.0)
'''
SLOW = '''
import threading
from pathlib import Path

from starling.rollout.engine.base import EngineLostError
from starling.rollout.engine.embedded.engine import transformers_engine

HERE = Path(__file__).parent


class Slow:
    """The embedded engine, whose start number `times` hangs, and records whether it was interrupted."""

    def __init__(self, spec):
        starts = HERE / "starts"
        with starts.open("a") as file:
            file.write("x")
        if len(starts.read_text()) == int((HERE / "times").read_text()):
            try:
                (HERE / "starting").touch()
                threading.Event().wait(600.0)
            finally:
                (HERE / "ended").touch()
        self._engine = transformers_engine(spec)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    @property
    def ready(self):
        return (HERE / "break").exists() or self._engine.ready

    def step(self):
        if (HERE / "break").exists():
            raise EngineLostError("the test broke it")
        return self._engine.step()
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with weights, and a long context."""
    folder = tmp_path_factory.mktemp("models") / "long"
    make_model_folder(ScratchSettings(config=SMALL, alphabet="abcdefgh>", max_length=ENDLESS + 100), folder)
    load_model(folder, init="random", seed=5).save_pretrained(folder)
    return folder


def flags(model: Path, *more: str) -> tuple[str, ...]:
    return ("--model.path", str(model), "--model.device", "cpu", "--rollout.load-weights", "true", *more)


def group(hub: FakeHub, max_tokens: int, text: str = "abc>", **fields: Any) -> wire.GenerateGroup:
    """Return the command for two greedy completions, which are equal."""
    return wire.GenerateGroup(
        lease=hub.lease("generate"),
        purpose="train",
        prompt=wire.Prompt(id="p", text=text),
        num_completions=2,
        sampling=wire.Sampling(max_tokens=max_tokens, temperature=0.0),
        min_version=0,
        **fields,
    )


def wait_until_sampling(hub: FakeHub) -> None:
    """Wait until a heartbeat reports running sequences."""
    hub.heartbeat(NAME, lambda status: status.gauges.get("rows", 0) > 0 and status.gauges["tokens_per_s"] > 0)


def arrays(buffers: tuple[bytes, ...]) -> tuple[Any, Any, Any]:
    """Return token ids, log-probabilities and versions of both completions, [2, tokens], of the last three buffers."""
    kinds = (np.int32, np.float32, np.int32)
    ids, logprobs, versions = (np.frombuffer(b, k).reshape(2, -1) for b, k in zip(buffers[-3:], kinds, strict=True))
    return ids, logprobs, versions


def test_interrupted_group_resumes_elsewhere_from_its_tokens(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    exclusive = flags(model, "--rollout.exclusive", "true")
    with replica(hub, NAME, tmp_path, *exclusive) as first:
        hello, _ = hub.hello(NAME)
        assert hello.version == 0, "the rollout has the weights of the folder"
        command = group(hub, ENDLESS)
        hub.send(NAME, command)
        wait_until_sampling(hub)
        first.terminate()
        interrupted, buffers = hub.answer(NAME, command.lease, wire.GroupInterrupted)
        assert interrupted.temperature == command.sampling.temperature
        assert interrupted.reason == "stopped by SIGTERM"
        assert exit_code(first) == 0
    num = interrupted.partial[0].num_tokens
    assert 0 < num < ENDLESS
    assert [meta.status for meta in interrupted.partial] == [None, None]
    num_tokens = num + 20
    with replica(hub, NAME, tmp_path, *exclusive):
        hub.hello(NAME)
        fresh = group(hub, num_tokens)
        _, uninterrupted = hub.ask(NAME, fresh, wire.GroupGenerated)
        resumed = group(hub, num_tokens, partial=interrupted.partial, tensors=interrupted.tensors)
        generated, result = hub.ask(NAME, resumed, wire.GroupGenerated, buffers)
        assert [trajectory.num_tokens for trajectory in generated.trajectories] == [num_tokens, num_tokens]
        assert result == uninterrupted, "the result differs from an uninterrupted one"
        assert arrays(result)[0][:, :num].tolist() == arrays(buffers)[0].tolist()

        inconsistent = group(
            hub, num_tokens, partial=(wire.PartialCompletionMeta(num_tokens=num + 1),) * 2, tensors=interrupted.tensors
        )
        _, result = hub.ask(NAME, inconsistent, wire.GroupGenerated, buffers)
        assert result == uninterrupted, "completions that cannot be resumed are generated anew"


def test_sleeping_rollout_hands_over_its_groups(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    with replica(hub, NAME, tmp_path, *flags(model)) as process:
        hub.hello(NAME)
        command = group(hub, ENDLESS)
        hub.send(NAME, command)
        wait_until_sampling(hub)
        hub.ask(NAME, wire.Sleep(lease=hub.lease("sleep")), wire.Slept)
        interrupted, _ = hub.answer(NAME, command.lease, wire.GroupInterrupted)
        assert interrupted.partial[0].num_tokens > 0
        hub.ask(NAME, wire.Sleep(lease=hub.lease("sleep")), wire.Slept)
        second = group(hub, 4)
        hub.send(NAME, second)
        status = hub.heartbeat(NAME, lambda status: bool(status.waits))
        assert [wait.what for wait in status.waits] == ["an order to wake up"]
        hub.ask(NAME, wire.Wake(lease=hub.lease("wake")), wire.Woken)
        hub.answer(NAME, second.lease, wire.GroupGenerated)
        process.terminate()
        assert exit_code(process) == 0


SHARED = wire.Welcome(heartbeat_s=0.05, lease_s=5.0, shares_devices=True)


def test_replica_that_loses_controller_releases_shared_devices(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.welcome = SHARED
    with replica(hub, NAME, tmp_path, *flags(model)) as process:
        hub.hello(NAME)
        command = group(hub, ENDLESS)
        hub.send(NAME, command)
        wait_until_sampling(hub)
        hub.ignores_heartbeats = True
        hub.next(NAME, wire.Hello)
        late = wire.Wake(lease=hub.lease("wake"))
        hub.send(NAME, late)
        interrupted, _ = hub.answer(NAME, command.lease, wire.GroupInterrupted)
        assert interrupted.partial[0].num_tokens > 0
        hub.ignores_heartbeats = False
        hub.hello(NAME)
        second = group(hub, 4)
        hub.send(NAME, second)
        status = hub.heartbeat(NAME, lambda status: bool(status.waits))
        assert [wait.what for wait in status.waits] == ["an order to wake up"]
        assert late.lease not in {held.lease for held in status.leases}, (
            "a wake command from before the loss was accepted"
        )
        hub.ask(NAME, wire.Wake(lease=hub.lease("wake")), wire.Woken)
        hub.answer(NAME, second.lease, wire.GroupGenerated)
        process.terminate()
        assert exit_code(process) == 0


def test_replica_that_cannot_release_shared_devices_ends(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "stuck.py"
    file.write_text(STUCK)
    hub.welcome = SHARED
    with replica(hub, NAME, tmp_path, *flags(model, "--rollout.engine", f"{file}:Stuck")) as process:
        hub.hello(NAME)
        hub.heartbeat(NAME, lambda status: True)
        assert exit_code(process) == 1


def test_lost_engine_is_restarted(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fragile.py"
    file.write_text(FRAGILE)
    engine_flags = ("--rollout.engine", f"{file}:Fragile", "--rollout.max-engine-restarts", "1")
    with replica(hub, NAME, tmp_path, *flags(model, *engine_flags)) as process:
        hub.hello(NAME)
        for times in (1, 2):
            command = group(hub, ENDLESS)
            hub.send(NAME, command)
            wait_until_sampling(hub)
            (tmp_path / "break").touch()
            interrupted, _ = hub.answer(NAME, command.lease, wire.GroupInterrupted)
            assert interrupted.reason == "its engine was lost: the test broke it"
            assert interrupted.partial[0].num_tokens > 0
            if times == 1:
                hub.ask(NAME, group(hub, 4), wire.GroupGenerated)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert errors.splitlines()[-1] == (
            "starling rollout-0: the engine was lost, and restarted 1 time within 600 s already "
            "(rollout.max_engine_restarts): the test broke it"
        )


def wait_for_file(file: Path) -> None:
    """Wait until `file` exists."""
    end = time.monotonic() + DEADLINE_S
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize("times", [1, 2])
def test_stop_during_engine_start_ends_replica(hub: FakeHub, model: Path, tmp_path: Path, times: int) -> None:
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    (tmp_path / "times").write_text(str(times))
    with replica(hub, NAME, tmp_path, *flags(model, "--rollout.engine", f"{file}:Slow")) as process:
        if times == 2:
            hub.hello(NAME)
            (tmp_path / "break").touch()
        wait_for_file(tmp_path / "starting")
        process.terminate()
        assert exit_code(process) == 0
        assert (tmp_path / "ended").exists(), "the starting engine was not ended"
        if times == 2:
            goodbye, _ = hub.next(NAME, wire.Leave)
            assert goodbye.reason == "stopped by SIGTERM"


def test_engine_lost_before_first_weights_is_restarted(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fragile.py"
    file.write_text(FRAGILE)
    published = version_tensors(load_model(model, init="random", seed=6))
    source = layout_of(published, "policy-0")
    engine_flags = ("--rollout.engine", f"{file}:Fragile", "--rollout.load-weights", "false")
    with (
        replica(hub, NAME, tmp_path, *flags(model), *engine_flags),
        Publisher(source, transport="tcp", delta_versions=0) as publisher,
    ):
        _, (layout,) = hub.hello(NAME)
        (tmp_path / "kill").touch()
        hub.heartbeat(NAME, lambda _: not (tmp_path / "kill").exists())
        order = wire.AdoptWeights(lease=hub.lease("adopt"), version=1, source="policy-0")
        plan = encode(make_plan(source, decode(Layout, layout)))
        hub.ask(NAME, order, wire.WeightsAdopted, (encode(publisher.publish(1, published)), plan))
        hub.ask(NAME, group(hub, 4), wire.GroupGenerated)


def test_engine_lost_asleep_is_restarted_on_wake(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fragile.py"
    file.write_text(FRAGILE)
    with replica(hub, NAME, tmp_path, *flags(model, "--rollout.engine", f"{file}:Fragile")):
        hub.hello(NAME)
        hub.ask(NAME, wire.Sleep(lease=hub.lease("sleep")), wire.Slept)
        (tmp_path / "kill").touch()
        hub.ask(NAME, wire.Sleep(lease=hub.lease("sleep")), wire.Slept)
        command = group(hub, 4)
        hub.send(NAME, command)
        status = hub.heartbeat(NAME, lambda status: bool(status.waits))
        assert [wait.what for wait in status.waits] == ["an order to wake up"]
        assert (tmp_path / "kill").exists(), "the sleeping engine was used"
        failed, _ = hub.ask(NAME, wire.Wake(lease=hub.lease("wake")), wire.LeaseFailed)
        assert failed.reason == "the test broke it"
        hub.answer(NAME, command.lease, wire.GroupGenerated)


def test_failed_pull_in_place_is_reported_and_next_version_adopted(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    published = version_tensors(load_model(model, init="random", seed=6))
    source = layout_of(published, "policy-0")
    with replica(hub, NAME, tmp_path, *flags(model, "--rollout.double-buffer", "false")):
        _, (layout,) = hub.hello(NAME)
        plan = encode(make_plan(source, decode(Layout, layout)))
        with Publisher(source, transport="tcp", delta_versions=0) as publisher:
            closed_offer = encode(publisher.publish(1, published))
        order = wire.AdoptWeights(lease=hub.lease("adopt"), version=1, source="policy-0")
        failed, _ = hub.ask(NAME, order, wire.LeaseFailed, (closed_offer, plan))
        assert "WeightsError" in failed.reason
        assert hub.heartbeat(NAME, lambda status: status.version == -1).waits == ()
        command = group(hub, 4)
        hub.send(NAME, command)
        status = hub.heartbeat(NAME, lambda status: bool(status.waits))
        assert [wait.what for wait in status.waits] == ["an order to adopt version 0 or newer"]
        with Publisher(source, transport="tcp", delta_versions=0) as publisher:
            order = wire.AdoptWeights(lease=hub.lease("adopt"), version=2, source="policy-0")
            hub.ask(NAME, order, wire.WeightsAdopted, (encode(publisher.publish(2, published)), plan))
        _, result = hub.answer(NAME, command.lease, wire.GroupGenerated)
        assert set(arrays(result)[2].ravel()) == {2}


def test_rollout_opens_no_transport_that_another_rollout_chose(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """An offer by a rollout for `gloo`, whose listeners trust all who connect: the reader connects to nothing."""
    published = version_tensors(load_model(model, init="random", seed=6))
    source = layout_of(published, "rollout-1")
    with (
        replica(hub, NAME, tmp_path, *flags(model)),
        Publisher(source, transport="tcp", delta_versions=0) as publisher,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        _, (layout,) = hub.hello(NAME)
        plan, offer = encode(make_plan(source, decode(Layout, layout))), publisher.publish(1, published)
        [rank] = offer.ranks
        forged = replace(rank, transport="gloo", address=f"127.0.0.1:{listener.getsockname()[1]}")
        order = wire.AdoptWeights(lease=hub.lease("adopt"), version=1, source="rollout-1")
        failed, _ = hub.ask(NAME, order, wire.LeaseFailed, (encode(replace(offer, ranks=(forged,))), plan))
        assert "'gloo', not encrypted, which this reader does not allow at 127.0.0.1" in failed.reason
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        order = wire.AdoptWeights(lease=hub.lease("adopt"), version=1, source="rollout-1")
        hub.ask(NAME, order, wire.WeightsAdopted, (encode(offer), plan))


MODES = {
    "keep": ("--rollout.adoption", "keep"),
    "recompute": ("--rollout.adoption", "recompute"),
    "finish": ("--rollout.adoption", "finish"),
    "in place": ("--rollout.adoption", "recompute", "--rollout.double-buffer", "false"),
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_adopted_in_every_mode(hub: FakeHub, model: Path, tmp_path: Path, mode: str) -> None:
    published = version_tensors(load_model(model, init="random", seed=6))
    source = layout_of(published, "policy-0")
    with (
        replica(hub, NAME, tmp_path, *flags(model, *MODES[mode])) as process,
        Publisher(source, transport="tcp", delta_versions=0) as publisher,
    ):
        _, (layout,) = hub.hello(NAME)
        plan = make_plan(source, decode(Layout, layout))
        buffers = (encode(publisher.publish(1, published)), encode(plan))
        command = group(hub, LONG if mode == "finish" else ENDLESS)
        hub.send(NAME, command)
        wait_until_sampling(hub)
        order = wire.AdoptWeights(lease=hub.lease("adopt"), version=1, source="policy-0")
        adopted, _ = hub.ask(NAME, order, wire.WeightsAdopted, buffers)
        assert adopted.mode == {"in place": "recompute"}.get(mode, mode)
        assert (adopted.recomputed_tokens > 0) == (adopted.mode == "recompute")
        if mode == "in place":  # with double buffering the switch may take longer than the pull of so small a model
            assert adopted.pause_s > adopted.pull_s
        if mode != "finish":
            hub.send(NAME, wire.ReleaseLeases(leases=(command.lease,)))
        else:
            assert adopted.drain_s > 0.0
            generated, result = hub.answer(NAME, command.lease, wire.GroupGenerated)
            assert {trajectory.newest_version for trajectory in generated.trajectories} == {0}
            assert set(arrays(result)[2].ravel()) == {0}
        _, result = hub.ask(NAME, group(hub, 5, "ab>"), wire.GroupGenerated)
        assert set(arrays(result)[2].ravel()) == {1}
        process.send_signal(signal.SIGTERM)
        assert exit_code(process) == 0
