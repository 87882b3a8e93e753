"""Saves of a policy process: on command, during steps, at intervals, on SIGUSR1, and before it leaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_hub import DEADLINE_S, RUN, FakeHub
from replica_processes import ForkedReplica, exit_code, replica
from test_policy_process import FLAGS, failure_reason, step_of, train

from starling.common.observe.process import EXIT_FAILED
from starling.common.wire import messages as wire
from starling.policy.train.checkpoint.header import find_state, state_versions
from starling.policy.train.checkpoint.storage import Storage

OPTIONS = {"key": "testing", "secret": "testing"}


@dataclass(frozen=True)
class Bucket:
    """An S3 bucket, its server process, and the flags of a policy that saves to it."""

    storage: Storage
    server: subprocess.Popen[str]
    flags: tuple[str, ...]


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """Serve S3 with one bucket from a separate process, which can be suspended."""
    import s3fs

    command = [sys.executable, "-m", "moto.server", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://[0-9.:]+", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()  # an unread pipe would block the server
            options = {**OPTIONS, "endpoint_url": address}
            s3fs.S3FileSystem(**options).mkdir("bucket")
            table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
            flags = ("--policy.saving.folder", "s3://bucket/runs", "--policy.saving.storage-options", f"{{{table}}}")
            yield Bucket(Storage("s3://bucket/runs", options), server, flags)
        finally:
            server.kill()


def states_of(storage: Storage) -> list[int]:
    """Return the versions of the complete states."""
    return [version for version, name in state_versions(storage) if "state.json" in storage.names(name)]


def test_policy_saves_to_s3_and_resumes_from_there(hub: FakeHub, model: Path, tmp_path: Path, bucket: Bucket) -> None:
    flags = ("--model.path", str(model), *FLAGS, *bucket.flags, "--policy.saving.best=-loss")
    flags += ("--policy.saving.hf-every=2",)
    home, options = bucket.storage.below(RUN), bucket.storage.fs.storage_options
    states = home.below("states")
    with replica(hub, "policy-0", tmp_path, *flags) as policy:
        assert hub.hello("policy-0")[0].version == 0
        train(hub, 1)
        policy.send_signal(signal.SIGUSR1)
        hub.heartbeat("policy-0", lambda status: states_of(states) == [1])
        train(hub, 2)
        train(hub, 3, next_prompt=9)
        order = wire.SaveCheckpoint(lease=hub.lease("save"), step=3, state=True, metrics={"loss": 0.25})
        saved, _ = hub.ask("policy-0", order, wire.CheckpointSaved)
        assert saved.path == f"s3://bucket/runs/{RUN}/states/version-3"
        assert "config.json" in home.names("checkpoints", "step-2"), "the export was written before"
        policy.kill()
    found = find_state(saved.path, options)
    assert (found.state.run, found.state.next_prompt, found.state.metrics["loss"]) == (RUN, 9, 0.25)
    with replica(hub, "policy-0", tmp_path / "elsewhere", *flags) as policy:
        assert hub.hello("policy-0")[0].version == 3
        train(hub, 4, next_prompt=12)
        policy.terminate()
        assert exit_code(policy) == 0
    assert states_of(states)[:2] == [4, 3], "the policy saved its last version before it left"
    newest = find_state(states.url(), options)
    assert (newest.state.version, newest.state.next_prompt) == (4, 12)


def test_steps_continue_while_storage_hangs(hub: FakeHub, model: Path, tmp_path: Path, bucket: Bucket) -> None:
    flags = ("--model.path", str(model), *FLAGS, *bucket.flags, "--policy.saving.patience-s=2")
    with replica(hub, "policy-0", tmp_path, *flags) as policy:
        hub.hello("policy-0")
        train(hub, 1)
        bucket.server.send_signal(signal.SIGSTOP)
        order = wire.SaveCheckpoint(lease=hub.lease("save"), step=1, state=True)
        hub.send("policy-0", order)
        train(hub, 2)
        another = wire.SaveCheckpoint(lease=hub.lease("save"), step=2, state=True)
        hub.send("policy-0", another)
        wait = hub.heartbeat("policy-0", lambda status: bool(status.waits)).waits[0]
        assert (wait.what, wait.on) == ("the state of version 1 to be written", "storage")
        failed, _ = hub.answer("policy-0", another.lease, wire.LeaseFailed)
        assert "the state of version 1 is not written after" in failed.reason, "the policy waits at most its timeout"
        bucket.server.send_signal(signal.SIGCONT)
        saved, _ = hub.answer("policy-0", order.lease, wire.CheckpointSaved)
        assert find_state(saved.path, bucket.storage.fs.storage_options).state.version == 1
        policy.terminate()
        assert exit_code(policy) == 0


def refuse(hub: FakeHub, policy: ForkedReplica) -> str:
    """End the policy's membership, as a lost connection does; return what it logs as it waits."""
    hub.send("policy-0", wire.Refused(reason="another process has this name"))
    return "write_awaited limit_s=1800.0"


def terminate(hub: FakeHub, policy: ForkedReplica) -> str:
    """Send SIGTERM; return what the policy logs as it waits."""
    policy.terminate()
    return "write_awaited limit_s=45.0"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("end", "code"), [(refuse, EXIT_FAILED), (terminate, 0)])
def test_policy_completes_a_write_before_it_exits(
    hub: FakeHub,
    model: Path,
    tmp_path: Path,
    bucket: Bucket,
    end: Callable[[FakeHub, ForkedReplica], str],
    code: int,
) -> None:
    flags = ("--model.path", str(model), *FLAGS, *bucket.flags, "--policy.saving.leave-s=45")
    with replica(hub, "policy-0", tmp_path, *flags) as policy:
        assert isinstance(policy, ForkedReplica)
        hub.hello("policy-0")
        train(hub, 1)
        bucket.server.send_signal(signal.SIGSTOP)
        hub.send("policy-0", wire.SaveCheckpoint(lease=hub.lease("save"), step=1, state=True))
        policy.wait_for_output("write_begun")
        policy.wait_for_output(end(hub, policy))
        bucket.server.send_signal(signal.SIGCONT)
        assert exit_code(policy) == code
    assert states_of(bucket.storage.below(RUN).below("states")) == [1]


def test_saved_state_is_of_the_command_and_failures_are_reported(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    with replica(hub, "policy-0", tmp_path, "--model.path", str(model), *FLAGS) as policy:
        hub.hello("policy-0")
        train(hub, 1)
        leases = [hub.lease("save"), hub.lease("checkpoint")]
        hub.send("policy-0", wire.SaveCheckpoint(lease=leases[0], step=1, state=True))
        hub.send("policy-0", wire.SaveCheckpoint(lease=leases[1], step=1))
        train(hub, 2)
        assert hub.answer("policy-0", leases[0], wire.CheckpointSaved)[0].step == 1
        assert hub.answer("policy-0", leases[1], wire.CheckpointSaved)[0].path.endswith("checkpoints/step-1")
        assert find_state(str(tmp_path)).state.version == 1
        late = wire.SaveCheckpoint(lease=hub.lease("save"), step=1, state=True)
        assert "step 1 cannot be saved: this policy holds version 2" in failure_reason(hub, late)
        (tmp_path / "states" / "version-2").write_text("in the way")
        blocked = wire.SaveCheckpoint(lease=hub.lease("save"), step=2, state=True)
        assert "states/version-2 is a file: remove it" in failure_reason(hub, blocked)
        assert find_state(str(tmp_path)).state.version == 1, "the previous state is unchanged"
        (tmp_path / "states" / "version-2").unlink()
        policy.terminate()
        assert exit_code(policy) == 0
    assert find_state(str(tmp_path)).state.version == 2


def test_run_begins_from_state_of_another_run(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    flags = ("--model.path", str(model), *FLAGS)
    with replica(hub, "policy-0", tmp_path / "one", *flags) as policy:
        hub.hello("policy-0")
        metrics = [train(hub, step) for step in (1, 2, 3)]
        policy.terminate()
        assert exit_code(policy) == 0
    begin = ("--policy.saving.begin-from", str(tmp_path / "one"))
    with replica(hub, "policy-0", tmp_path / "other", *flags, *begin) as policy:
        assert hub.hello("policy-0")[0].version == 3
        metrics.append(train(hub, 4))
        policy.terminate()
        assert exit_code(policy) == 0
    with replica(hub, "policy-0", tmp_path / "whole", *flags) as policy:
        hub.hello("policy-0")
        assert [train(hub, step) for step in (1, 2, 3, 4)] == metrics
        policy.terminate()
        assert exit_code(policy) == 0
    digests = [find_state(str(tmp_path / name)).state.digests for name in ("other", "whole")]
    assert digests[0] == digests[1]


BREAKS = """
from starling.algo.algorithm import Algorithm
from starling.algo.loss.terms import LossTerms, Tokens

seen = set()


def loss(tokens: Tokens) -> LossTerms:
    known = float(tokens.rollout_logprobs.sum())
    if known in seen:
        raise ValueError("no second pass")
    seen.add(known)
    return LossTerms(-tokens.advantages * tokens.logprobs, {})


algorithm = Algorithm(loss=loss)
"""


def test_policy_with_failed_step_ends_and_resumes_from_its_state(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    flags = ("--model.path", str(model), *FLAGS, "--policy.algorithm.num-passes", "2")
    flags += ("--policy.algorithm.name", f"{tmp_path}/breaks.py:algorithm", "--policy.algorithm.kl-coefficient", "0")
    with replica(hub, "policy-0", tmp_path, *flags) as policy:
        hub.hello("policy-0")
        train(hub, 1)
        train(hub, 2)
        save = wire.SaveCheckpoint(lease=hub.lease("save"), step=2, state=True)
        hub.send("policy-0", save)
        message, buffers = step_of(hub.lease("train"), 3)
        hub.send("policy-0", message, buffers)
        _, errors = policy.communicate(timeout=DEADLINE_S)
    assert policy.returncode == EXIT_FAILED, "a process that fails because of the recipe is not restarted"
    assert "its weights are not a version" in errors
    assert "no second pass" in errors
    assert "Traceback" not in errors
    assert find_state(str(tmp_path)).state.version == 2, "the state being written is complete"
    with replica(hub, "policy-0", tmp_path, *flags):
        assert hub.hello("policy-0")[0].version == 2
