"""The policy process: after a kill it repeats its steps bit for bit; its answers to commands."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import exit_code, replica

from starling.common.wire import messages as wire
from starling.weightsync.offers.offer import decode_offer

NUM_SFT, LAST = 2, 6
FLAGS = (
    *("--policy.init", "random", "--policy.transport", "local", "--model.device", "cpu"),
    *("--policy.optimizer.learning-rate", "0.003", "--policy.optimizer.schedule", "cosine"),
    *("--policy.sft.optimizer.learning-rate", "0.003", "--policy.algorithm.kl-coefficient", "0.05"),
)


def step_of(lease: str, step: int, **fields: Any) -> tuple[wire.TrainStep, tuple[bytes, ...]]:
    """Return a deterministic training step; the first `NUM_SFT` steps are supervised."""
    generator = np.random.default_rng(step)
    if step <= NUM_SFT:
        words = ["".join(generator.choice(list("abcdefgh"), 4)) for _ in range(4)]
        examples = tuple(wire.Prompt(id=f"sft/{word}", text=f"{word}>", reference=word[::-1]) for word in words)
        return wire.TrainStep(lease=lease, step=step, examples=examples, num_steps=NUM_SFT, **fields), ()
    groups, buffers = [], []
    for index in range(3):
        lengths = generator.integers(1, 6, 4).tolist()
        total = sum(lengths)
        arrays = [
            generator.integers(3, 12, 5).astype(np.int32),
            generator.integers(3, 12, total).astype(np.int32),
            (-2.5 + 0.3 * generator.standard_normal(total)).astype(np.float32),
            np.full(total, step - 1, dtype=np.int32),
        ]
        rewards = generator.standard_normal(4).tolist()
        scored = tuple(
            wire.ScoredTrajectory(num_tokens=length, oldest_version=step - 1, reward=reward)
            for length, reward in zip(lengths, rewards, strict=True)
        )
        metas = tuple(wire.TensorMeta(dtype=a.dtype.name, shape=a.shape, nbytes=a.nbytes) for a in arrays)
        groups.append(wire.TrainGroup(prompt_id=f"train/{index}", trajectories=scored, tensors=metas))
        buffers += [array.tobytes() for array in arrays]
    message = wire.TrainStep(lease=lease, step=step, groups=tuple(groups), num_steps=LAST - NUM_SFT, **fields)
    return message, tuple(buffers)


def train(hub: FakeHub, step: int, **fields: Any) -> dict[str, float]:
    """Train a step, and return its metrics without times and rates."""
    message, buffers = step_of(hub.lease("train"), step, **fields)
    trained, _ = hub.ask("policy-0", message, wire.StepTrained, buffers)
    assert trained.step == step
    time_shares = [
        value for name, value in trained.metrics.items() if name.startswith("time/") and name.endswith("_share")
    ]
    assert math.isclose(math.fsum(time_shares), 1.0, rel_tol=1e-12)
    timed = ("train_s", "tokens_per_s", "tflops")
    return {name: v for name, v in trained.metrics.items() if name not in timed and not name.startswith("time/")}


def save(hub: FakeHub, step: int) -> dict[str, str]:
    """Save a state, and return the digests of its files."""
    message = wire.SaveCheckpoint(lease=hub.lease("save"), step=step, state=True)
    saved, _ = hub.ask("policy-0", message, wire.CheckpointSaved)
    assert saved.state
    digests: dict[str, str] = json.loads((Path(saved.path) / "state.json").read_text())["state"]["digests"]
    return digests


def publish(hub: FakeHub, version: int) -> bytes:
    message = wire.PublishWeights(lease=hub.lease("publish"), version=version)
    published, (encoded,) = hub.ask("policy-0", message, wire.WeightsPublished)
    assert published.version == version
    assert decode_offer(encoded).version == version
    return encoded


def test_policy_resumes_bitwise_after_kill(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    flags = ("--model.path", str(model), *FLAGS)
    with replica(hub, "policy-0", tmp_path / "crashed", *flags) as policy:
        hello, _ = hub.hello("policy-0")
        assert (hello.version, hello.serves, hello.peer) == (0, True, "")
        first = [train(hub, step) for step in (1, 2, 3)]
        save(hub, 3)
        first += [train(hub, 4)]
        policy.kill()
    with replica(hub, "policy-0", tmp_path / "crashed", *flags) as policy:
        assert hub.hello("policy-0")[0].version == 3
        publish(hub, 3)
        # The version that the step names was published by the process that is gone.
        assert train(hub, 4, replayed=True, published=4) == first[3]
        first += [train(hub, step) for step in (5, 6)]
        root = decode_offer(publish(hub, LAST)).root
        digests = save(hub, LAST)
        policy.terminate()
        assert exit_code(policy) == 0
    with replica(hub, "policy-0", tmp_path / "whole", *flags) as policy:
        assert hub.hello("policy-0")[0].version == 0
        assert [train(hub, step, replayed=True) for step in range(1, LAST + 1)] == first
        assert save(hub, LAST) == digests, "weights, optimizer, reference and generators"
        assert decode_offer(publish(hub, LAST)).root == root
        hub.send("policy-0", wire.Drain(reason="the run is over"))
        assert exit_code(policy) == 0
    assert sorted(path.name for path in (tmp_path / "crashed/states").iterdir()) == ["version-3", "version-6"]


def test_replica_that_loses_controller_releases_shared_devices(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.welcome = wire.Welcome(heartbeat_s=0.05, lease_s=5.0, shares_devices=True)
    with replica(hub, "policy-0", tmp_path, "--model.path", str(model), *FLAGS) as process:
        hub.hello("policy-0")
        publish(hub, 0)
        hub.ignores_heartbeats = True
        hub.next("policy-0", wire.Hello)
        hub.ignores_heartbeats = False
        hub.hello("policy-0")
        assert failure_reason(hub, wire.PublishWeights(lease=hub.lease("publish"), version=0)) == (
            "this policy is asleep: wake it first"
        )
        hub.ask("policy-0", wire.Wake(lease=hub.lease("wake")), wire.Woken)
        publish(hub, 0)
        process.terminate()
        assert exit_code(process) == 0


def failure_reason(hub: FakeHub, message: Any, buffers: tuple[bytes, ...] = ()) -> str:
    failed, _ = hub.ask("policy-0", message, wire.LeaseFailed, buffers)
    assert failed.fatal
    return failed.reason


def test_policy_answers_to_commands(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    with replica(hub, "policy-0", tmp_path, "--model.path", str(model), *FLAGS) as policy:
        hub.hello("policy-0")
        early, buffers = step_of(hub.lease("train"), 1, published=0)
        hub.send("policy-0", early, buffers)
        heartbeat = hub.heartbeat("policy-0", lambda status: bool(status.waits))
        assert [(wait.what, wait.on) for wait in heartbeat.waits] == [
            ("the command to publish version 0, before step 1", "controller")
        ]
        assert 0.0 < heartbeat.waits[0].seconds_left <= 60.0
        assert heartbeat.offered == -1
        offer = publish(hub, 0)
        hub.answer("policy-0", early.lease, wire.StepTrained)
        assert publish(hub, 0) == offer, "the policy holds version 1 and still offers version 0"
        heartbeat = hub.heartbeat("policy-0", lambda status: status.version == 1 and not status.waits)
        assert heartbeat.offered == 0

        shared, _ = step_of(hub.lease("train"), 2, peers=("a:1", "b:1"), replica=1)
        assert "of 2 policies together, and this one trains alone" in failure_reason(hub, shared)
        unknown, _ = step_of(hub.lease("train"), 2, settings={"policy.optimizer.betas": 0.5})
        assert "policy.optimizer.betas = 0.5 cannot be changed from one step to the next" in failure_reason(
            hub, unknown
        )
        adopt = wire.AdoptWeights(lease=hub.lease("adopt"), version=2, source="policy-1", peer="a:1")
        assert "adopts none from others" in failure_reason(hub, adopt, (b"offer", b"plan"))
        assert train(hub, 2, settings={"policy.sft.optimizer.learning_rate": 0.5})["learning_rate"] == 0.5
        policy.terminate()
        assert exit_code(policy) == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--policy.algorithm.name", "grop"), "there is no algorithm 'grop': give one of grpo, "),
        (
            ("--policy.sft.optimizer.no-decay", '["lm_hed"]'),
            "policy.sft.optimizer.no_decay has 'lm_hed', which matches no trainable parameter; ",
        ),
    ],
)
def test_invalid_recipe_is_reported_before_policy_joins(
    hub: FakeHub, model: Path, tmp_path: Path, flags: tuple[str, ...], expected: str
) -> None:
    with replica(hub, "policy-0", tmp_path, "--model.path", str(model), *FLAGS, *flags) as policy:
        _, errors = policy.communicate(timeout=DEADLINE_S)
    sentence = errors.splitlines()[-1]
    assert sentence.startswith("starling policy-0: ")
    assert expected in sentence
    assert "Traceback" not in errors
    assert policy.returncode == 2
    assert not hub.has_unread()


def test_ready_event_names_the_transport_in_use(
    hub: FakeHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ucxx.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ("--model.path", str(model), *FLAGS, "--policy.transport", "ucx", "--run.log-format", "json")
    with replica(hub, "policy-0", tmp_path, *flags, fresh=True) as policy:
        hub.hello("policy-0")
        policy.terminate()
        _, errors = policy.communicate(timeout=DEADLINE_S)
    (ready,) = [json.loads(line) for line in errors.splitlines() if '"event":"ready"' in line.replace(": ", ":")]
    assert ready["transport"] == "tcp", errors
