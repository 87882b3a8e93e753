"""A replay reconstructs the recorded state, and `starling replay` prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_run import HELD_OUT, PLAN, Rows, hello, record_run

from starling.cli import main as cli
from starling.cli.report.replay import describe_event, state_view
from starling.common.errors import ConfigError
from starling.common.ids import LEASE_KINDS
from starling.common.wire import messages as wire
from starling.controller.core.events import (
    CheckpointRead,
    Command,
    Fetched,
    NotSent,
    Received,
    ReplicaDisconnected,
    Send,
    StopRequested,
    Stored,
    Write,
)
from starling.controller.core.records import JournalEntry, RewardsStored
from starling.controller.shell.recording.format import PromptFrame, read_recording
from starling.controller.shell.recording.recorder import Recorder
from starling.controller.shell.recording.replay import ReplayError, replay
from starling.controller.shell.status import MetricsHistory, snapshot


def without_buffers(commands: list[Command]) -> list[Command]:
    """Return commands with the sizes of their buffers only, because a replay has zeros for unread buffers."""
    return [_without_buffers(command) for command in commands]


def _without_buffers(command: Command) -> Command:
    match command:
        case Send(peer=peer, message=message, buffers=buffers):
            return Send(peer, message, tuple(bytes(len(buffer)) for buffer in buffers))
        case Write(record=record, payload=payload):
            return Write(record, tuple(bytes(len(buffer)) for buffer in payload))
        case _:
            return command


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the recording."""
    return tmp_path / "events-1.rec"


def test_replay_reproduces_the_commands_of_every_event(path: Path) -> None:
    controller, said = record_run(path)
    assert controller.state.version == PLAN.last_step, "the run is complete"
    for number, commands in enumerate(said, 1):
        assert without_buffers(replay(path, number).commands) == without_buffers(commands)
    replayed = replay(path)
    assert replayed.num_events == len(said)
    assert replayed.ended == ""
    assert replayed.controller.waiting_for == controller.waiting_for
    assert replay(path, 0).controller.state.version == 0


def test_replay_until_reproduces_an_earlier_state(path: Path) -> None:
    controller, _ = record_run(path, max_events=12)
    replayed = replay(path)
    was, made = (snapshot(one.state, MetricsHistory(0.0), 4.0, 0) for one in (controller, replayed.controller))
    assert made == was
    assert sum(made.groups.values()) > 0
    leases = {member["name"]: member["leases"] for member in state_view(replayed)["members"]}
    assert leases == {name: sorted(controller.state.replicas.leases.of(name, *LEASE_KINDS)) for name in leases}


def test_replay_leaves_out_an_event_without_its_prompts(path: Path) -> None:
    record_run(path)
    entries = list(read_recording(path)[2])
    last = max(i for i, entry in enumerate(entries) if isinstance(entry, PromptFrame))
    num_events = sum(not isinstance(entry, PromptFrame) for entry in entries[:last])
    path.write_bytes(path.read_bytes()[: _end_of_frame(path, last) - 3])
    replayed = replay(path)
    assert replayed.num_events == num_events - 1
    assert replayed.ended is not None
    assert "cut off" in replayed.ended


def _end_of_frame(path: Path, entry: int) -> int:
    data = path.read_bytes()
    at = data.index(b"\n") + 1
    for _ in range(entry + 2):  # the header is a frame too
        at += 8 + int.from_bytes(data[at : at + 4], "little")
    return at


def test_replay_rejects_too_many_events(path: Path) -> None:
    _, said = record_run(path, max_events=9)
    with pytest.raises(ConfigError, match="has 9 events; give --until a number up to that"):
        replay(path, len(said) + 1)


def test_replay_names_the_event_at_which_the_core_fails(path: Path) -> None:
    recorder = Recorder(path, run="r", incarnation=1, plan=PLAN, past=(), held_out=HELD_OUT, cap_bytes=1 << 20)
    recorder.event(hello("reward-0", "reward", 1.0))
    for position in range(10):
        recorder.prompt("prompts", position, Rows("prompts").prompt(position))
    # The codec never accepts an announced layout without its buffer.
    said = wire.Hello(role="rollout", host="here", pid=1, num_slots=4, has_layout=True)
    recorder.event(Received(2.0, "rollout-0", 1, said))
    recorder.close()
    with pytest.raises(ReplayError, match=r"fails at event 2, a Received at 2\.000 s, .*IndexError.*--until 1 shows"):
        replay(path)
    assert replay(path, 1).num_events == 1


def test_replay_rejects_a_missing_prompt(path: Path) -> None:
    recorder = Recorder(path, run="r", incarnation=1, plan=PLAN, past=(), held_out=HELD_OUT, cap_bytes=1 << 20)
    recorder.event(hello("policy-0", "policy", 1.0))
    recorder.close()
    with pytest.raises(ConfigError, match=r"lacks number 0 of the (prompts|examples)"):
        replay(path)


# --- the commands --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run with one attempt, whose controller was started twice."""
    attempt = tmp_path / "attempt-1"
    (attempt / "logs").mkdir(parents=True)
    record_run(attempt / "events-1.rec", max_events=9)
    record_run(attempt / "events-2.rec", max_events=12)
    (attempt / "config.toml").write_text("[run]\n")
    (attempt / "logs" / "controller.log").write_text("began\nfailed\n")
    return tmp_path


def test_replay_of_a_crash_report(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.zip"
    assert cli.main(["record", str(folder), "--out", str(out)]) == 0
    assert "incarnations 1, 2 of the controller" in capsys.readouterr().out
    assert cli.main(["replay", str(out), "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["num_events"], view["run"], view["ended"]) == (12, "a-run", "")
    assert [member["name"] for member in view["members"]] == ["policy-0", "reward-0", "rollout-0"]
    assert cli.main(["replay", str(out), "--json", "--incarnation", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["num_events"] == 9


def test_replay_command_prints_the_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(folder), "--until", "3"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "run a-run",
        "after 3 events",
        "more events follow",
        "phase sft, version 0 of 3",
        "waiting for: the policy to train step 1",
        "policy-0 sent hello: a policy with version 0",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["replay", "nothing.rec"], "there is no nothing.rec; give a recording"),
        (["replay", "."], "has no recording (events-<n>.rec)"),
        (["replay", "attempt-1", "--incarnation", "7"], "has no recording of incarnation 7; it has 1, 2"),
        (["replay", "attempt-1", "--until", "99"], "has 12 events"),
        (["record", "nowhere"], "there is no folder nowhere"),
        (["record", "attempt-1", "--out", "nowhere/x.zip"], "cannot write nowhere/x.zip: No such file"),
    ],
)
def test_replay_command_rejects_bad_input(
    folder: Path,
    arguments: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder / "empty" if arguments == ["replay", "."] else folder)
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


def test_replay_command_describes_events() -> None:
    held = wire.HeldLease(lease="generate:t3:1.4", phase="working")
    beat = wire.Heartbeat(leases=(held,), version=2)
    assert describe_event(Received(1.0, "rollout-0", 1, beat)) == (
        "rollout-0 sent heartbeat: version 2, holding generate:t3:1.4 working"
    )
    trained = wire.StepTrained(lease="train:4:1.9", step=4, metrics={})
    assert describe_event(Received(1.0, "policy-0", 1, trained)) == "policy-0 sent step_trained train:4:1.9"
    assert describe_event(ReplicaDisconnected(1.0, "rollout-1")) == "the connection of rollout-1 closed"
    assert describe_event(StopRequested(1.0, "SIGTERM")) == "a stop was requested: SIGTERM"
    kept = JournalEntry(RewardsStored(key="t0", rewards=()))
    assert describe_event(Fetched(1.0, 5, (kept,))) == "1 records of step 5 were read"
    assert describe_event(Stored(1.0, 5)) == "the groups of step 5 are in a file"
    assert describe_event(CheckpointRead(1.0, "a1")) == "the digest of the checkpoint is a1"
    assert describe_event(CheckpointRead(1.0, "")) == "the checkpoint cannot be read"
    not_sent = NotSent(1.0, "policy-0", "train:4:1.9", "too large")
    assert describe_event(not_sent) == "train:4:1.9 was not sent to policy-0: too large"


def test_replay_keeps_streams_apart(path: Path) -> None:
    record_run(path)
    reads = [entry for entry in read_recording(path)[2] if isinstance(entry, PromptFrame)]
    assert {read.stream for read in reads} == {"prompts", "examples"}
    assert all(read.prompt == Rows(read.stream).prompt(read.position) for read in reads)
