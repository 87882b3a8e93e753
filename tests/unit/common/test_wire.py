"""Wire format: recorded schema, compatibility with plain msgspec, and invalid frames."""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import WireError
from starling.common.wire import codec, messages
from starling.common.wire.messages import Down, Envelope, Up
from starling.common.wire.schema import FAMILIES, NESTED, RECEIVERS, breaking_changes, markdown, schema

ROOT = Path(__file__).parents[3]
WIRE = ROOT / "libs/common/starling/common/wire"
ENVELOPE = Envelope(protocol=1, run="demo/attempt-1/0badcafe", sender="rollout-0", incarnation=7, seq=3, cause="tick")


def present_schema() -> object:
    return json.loads(msgspec.json.encode(schema()))


def test_recorded_schema_is_current() -> None:
    recorded = json.loads((WIRE / "schema.json").read_text())
    assert present_schema() == recorded, "the wire changed: run `make docs`, and raise the protocol if peers break"


def test_protocol_page_is_current() -> None:
    assert (ROOT / "docs/reference/protocol.md").read_text() == markdown(), "run `make docs`"


def test_families_and_receivers_cover_each_message_once() -> None:
    members = [member for family in FAMILIES for member in family.members]
    assert len(members) == len(set(members))
    assert set(members) == {*messages.Up.__args__, *messages.Down.__args__}
    assert set(RECEIVERS) == set(messages.Down.__args__)


def test_no_message_is_tracked_by_the_garbage_collector() -> None:
    members = [member for family in FAMILIES for member in family.members]
    assert [one.__name__ for one in (*members, *NESTED) if one.__struct_config__.gc] == []


@pytest.mark.parametrize("change", ["drop a message", "rename a field", "new field without default"])
def test_breaking_changes_are_found(change: str) -> None:
    recorded, now = present_schema(), present_schema()
    assert isinstance(recorded, dict)
    assert isinstance(now, dict)
    assert breaking_changes(recorded, now) == []
    if change == "drop a message":
        del now["up"]["hello"]
    elif change == "rename a field":
        now["down"]["train_step"][0]["name"] = "leash"
    else:
        now["nested"]["Prompt"].append({"name": "extra", "type": "int", "required": True})
    assert len(breaking_changes(recorded, now)) == 1


def test_new_last_field_with_default_is_compatible() -> None:
    recorded, now = present_schema(), present_schema()
    assert isinstance(recorded, dict)
    assert isinstance(now, dict)
    now["up"]["leave"].append({"name": "code", "type": "int", "required": False, "default": 0})
    assert breaking_changes(recorded, now) == []


def test_unknown_field_of_a_newer_peer_is_ignored() -> None:
    frame = msgpack.packb({"type": "leave", "reason": "done", "mood": "good"})
    assert codec.unpack_up([b"", frame]) == messages.Leave(reason="done")


SAMPLES: list[tuple[Up | Down, tuple[bytes, ...]]] = [
    (messages.Hello(role="policy", host="h", pid=1, has_layout=True), (b"layout",)),
    (messages.Heartbeat(leases=(messages.HeldLease(lease="train:1:0", phase="working"),), version=3), ()),
    (messages.QueryRun(request="r1", about="why"), ()),
    (messages.ChangeSetting(request="r2", key="sampling.temperature", value=0.5), ()),
    (messages.RequestEvaluation(request="r3"), ()),
    (messages.RequestCheckpoint(request="r5"), ()),
    (messages.RequestStop(request="r4", reason="enough"), ()),
    (messages.RequestProfile(request="0" * 32, targets=("policy-0", "controller"), ranks=(0, 1), memory=True), ()),
    (messages.ScaleReplicas(request="r5", role="rollout", num=8), ()),
    (messages.DrainReplica(request="r6", name="rollout-3"), ()),
    (messages.OperatorReply(request="r1", ok=True, text="it waits", data={"a": 1}), ()),
    (messages.Leave(reason="done"), ()),
    (
        messages.GroupGenerated(
            lease="generate:t0:0",
            trajectories=(
                messages.TrajectoryMeta(
                    status=messages.Status.OK, num_tokens=2, text="ab", oldest_version=1, newest_version=2
                ),
            ),
            tensors=(messages.TensorMeta(dtype="int32", shape=(2,), nbytes=8),),
        ),
        (b"\x01\0\0\0\x02\0\0\0",),
    ),
    (
        messages.GroupInterrupted(
            lease="generate:t0:0",
            reason="stopped by SIGTERM",
            partial=(messages.PartialCompletionMeta(num_tokens=1), messages.PartialCompletionMeta(num_tokens=0)),
            tensors=(
                messages.TensorMeta(dtype="int32", shape=(1,), nbytes=4),
                messages.TensorMeta(dtype="float32", shape=(1,), nbytes=4),
                messages.TensorMeta(dtype="int32", shape=(1,), nbytes=4),
            ),
        ),
        (b"\x01\0\0\0", b"\0\0\x80\xbf", b"\0\0\0\0"),
    ),
    (messages.GroupScored(lease="score:t0:0", rewards=(1.0, None), statuses=(messages.Status.OK,) * 2), ()),
    (
        messages.TokensScored(
            lease="teach:t0:0",
            tensors=(
                messages.TensorMeta(dtype="float32", shape=(1,), nbytes=4, name="teacher_logprobs"),
                messages.TensorMeta(dtype="int32", shape=(1, 2), nbytes=8, name="teacher_top_ids"),
            ),
        ),
        (b"\0\0\x80\xbf", b"\x01\0\0\0\x02\0\0\0"),
    ),
    (messages.StepTrained(lease="train:1:0", step=1, metrics={"loss": 0.5}), ()),
    (messages.WeightsPublished(lease="publish:1:0", version=1, publish_s=0.1), (b"offer",)),
    (
        messages.WeightsAdopted(
            lease="adopt:1:0", version=1, root="ab", pull_s=0.1, pause_s=0.01, size_bytes=9, transport="ucx"
        ),
        (),
    ),
    (messages.RelayOffered(lease="adopt:1:0", version=1), (b"offer",)),
    (messages.Slept(lease="sleep:rollout-0:0"), ()),
    (messages.Woken(lease="wake:rollout-0:0"), ()),
    (messages.CheckpointSaved(lease="checkpoint:1:0", step=1, path="/x"), ()),
    (messages.LeaseFailed(lease="adopt:1:0", status=messages.Status.INFRA_LOST, reason="late"), ()),
    (messages.RequestSettings(with_model=True), ()),
    (messages.ReportFault(reason="the disk is full"), ()),
    (
        messages.RoleSettings(
            sections={"rollout": {"num_slots": 4}},
            withheld=("rollout.api.key",),
            files=(messages.ModelFile(name="config.json", nbytes=2, digest="0" * 32),),
        ),
        (b"{}",),
    ),
    (messages.Welcome(heartbeat_s=1.0, lease_s=10.0), ()),
    (messages.RequestHello(), ()),
    (messages.Refused(reason="no"), ()),
    (
        messages.GenerateGroup(
            lease="generate:t0:0",
            purpose="train",
            prompt=messages.Prompt(id="train/0/0", text="abc>", reference="cba"),
            num_completions=2,
            sampling=messages.Sampling(max_tokens=8, seed=5),
            min_version=1,
        ),
        (),
    ),
    (
        messages.ScoreGroup(
            lease="score:t0:0",
            prompt=messages.Prompt(id="p", messages=(messages.ChatMessage(role="user", content="hi"),)),
            completions=(messages.CompletionText(text="x", status=messages.Status.TRUNCATED, num_tokens=1),),
        ),
        (),
    ),
    (
        messages.ScoreTokens(
            lease="teach:t0:0",
            prompt_id="p",
            lengths=(1,),
            temperature=0.5,
            tensors=(messages.TensorMeta(dtype="int32", shape=(1,), nbytes=4),) * 2,
        ),
        (b"\x01\0\0\0", b"\x02\0\0\0"),
    ),
    (
        messages.TrainStep(
            lease="train:2:0",
            step=2,
            groups=(
                messages.TrainGroup(
                    prompt_id="p",
                    trajectories=(messages.ScoredTrajectory(num_tokens=1, oldest_version=1, reward=0.5),),
                    tensors=(messages.TensorMeta(dtype="int32", shape=(1,), nbytes=4),),
                ),
            ),
        ),
        (b"\x01\0\0\0",),
    ),
    (messages.PublishWeights(lease="publish:1:0", version=1), ()),
    (messages.AdoptWeights(lease="adopt:1:0", version=1), (b"offer", b"plan")),
    (messages.Sleep(lease="sleep:rollout-0:0"), ()),
    (messages.Wake(lease="wake:rollout-0:0"), ()),
    (messages.SaveCheckpoint(lease="checkpoint:1:0", step=1), ()),
    (messages.ReleaseLeases(leases=("a", "b")), ()),
    (messages.Drain(reason="done"), ()),
    (messages.Profile(profile="0" * 32, num_steps=3, seconds=10.0, num_groups=0, limit_s=300.0, ranks=(0,)), ()),
]
BY_TAG = {type(message).__struct_config__.tag: (message, buffers) for message, buffers in SAMPLES}


def test_every_message_has_a_sample() -> None:
    assert sorted(BY_TAG) == sorted([*codec.type_names["up"], *codec.type_names["down"]])


@pytest.mark.parametrize("tag", sorted(BY_TAG))
def test_round_trip_and_decoding_with_msgpack(tag: str) -> None:
    message, buffers = BY_TAG[tag]
    frames = codec.pack(ENVELOPE, message, buffers)
    decode = codec.unpack_up if tag in codec.type_names["up"] else codec.unpack_down
    assert codec.unpack_envelope(frames) == ENVELOPE
    assert decode(frames) == message
    foreign = msgpack.unpackb(frames[1])
    assert foreign.pop("type") == tag
    ours = json.loads(msgspec.json.encode(message))
    assert {"type": tag, **foreign} == ours
    assert decode([frames[0], msgpack.packb({"type": tag, **foreign}), *frames[2:]]) == message


def test_golden_frames_still_decode() -> None:
    """Recorded frames must stay readable, or running jobs break."""
    golden = json.loads((Path(__file__).parent / "golden_frames.json").read_text())
    assert sorted(golden) == sorted(BY_TAG)
    for tag, text in golden.items():
        message, buffers = BY_TAG[tag]
        decode = codec.unpack_up if tag in codec.type_names["up"] else codec.unpack_down
        assert decode([b"", bytes.fromhex(text), *buffers]) == message, tag


@pytest.mark.parametrize("tag", [tag for tag, (_, buffers) in BY_TAG.items() if buffers])
def test_buffers_must_match_their_description(tag: str) -> None:
    message, buffers = BY_TAG[tag]
    frames = codec.pack(ENVELOPE, message, buffers)
    decode = codec.unpack_up if tag in codec.type_names["up"] else codec.unpack_down
    for wrong in (frames[:-1], [*frames, b"more"]):
        with pytest.raises(WireError):
            decode(wrong)


def test_group_to_score_has_the_latents_that_it_describes() -> None:
    latents = messages.TensorMeta(dtype="float16", shape=(1, 1, 1, 2), nbytes=4, name="latents")
    made = messages.CompletionText(text="", status=messages.Status.OK, num_tokens=3)
    message = messages.ScoreGroup(
        lease="score:t0:0", prompt=messages.Prompt(id="p"), completions=(made,), tensors=(latents,)
    )
    frames = codec.pack(ENVELOPE, message, (b"\x01\0\0\0",))
    assert codec.unpack_down(frames) == message
    for wrong in (frames[:-1], [*frames, b"more"], [*frames[:-1], b"\x01"]):
        with pytest.raises(WireError, match="ScoreGroup does not describe the sizes"):
            codec.unpack_down(wrong)


def test_limits_are_checked_before_decoding() -> None:
    big = b"\xc1" * (codec.MAX_MESSAGE_BYTES + 1)
    with pytest.raises(WireError, match="over the limit"):
        codec.unpack_up([b"", big])
    with pytest.raises(WireError, match="over the limit"):
        codec.unpack_envelope([b"\xc1" * (codec.MAX_ENVELOPE_BYTES + 1), b""])
    with pytest.raises(WireError, match="at least 2 frames"):
        codec.unpack_envelope([b""])
    with pytest.raises(WireError, match="over the limit"):
        codec.pack(ENVELOPE, messages.Drain(reason="x" * codec.MAX_MESSAGE_BYTES))


@given(st.binary(max_size=400))
def test_garbage_raises_wire_error(garbage: bytes) -> None:
    for decode in (codec.unpack_up, codec.unpack_down):
        with pytest.raises(WireError):
            decode([b"", garbage])
    with pytest.raises(WireError):
        codec.unpack_envelope([garbage, b""])


@given(st.sampled_from(sorted(BY_TAG)), st.data())
def test_mutated_frames_decode_or_raise_wire_error(tag: str, data: st.DataObject) -> None:
    message, buffers = BY_TAG[tag]
    frame = bytearray(codec.pack(ENVELOPE, message, buffers)[1])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for decode in (codec.unpack_up, codec.unpack_down):
        try:
            decode([b"", bytes(frame), *buffers])
        except WireError:
            pass
