"""States in an object store: a real S3 server, killed writers, unreachable stores."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked
from state_writers import write_endlessly
from structlog.testing import capture_logs

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.header import VerifiedState, find_state, newest_state
from starling.policy.train.checkpoint.huggingface import export_hf
from starling.policy.train.checkpoint.state import (
    HostBuffers,
    SavedState,
    StateMetadata,
    StateStore,
    in_section,
    take_state,
)
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.model.load import version_tensors

CREDENTIALS = {"key": "testing", "secret": "testing"}


@dataclass(frozen=True)
class Store:
    """A bucket and its endpoint."""

    url: str
    options: dict[str, Any]

    def storage(self, *names: str) -> Storage:
        return Storage("/".join((self.url, *names)), self.options)


@pytest.fixture
def store(endpoint: str, request: pytest.FixtureRequest) -> Store:
    """Return a new bucket."""
    import s3fs

    options = {"endpoint_url": endpoint, **CREDENTIALS}
    bucket = f"bucket-{abs(hash(request.node.name))}"
    s3fs.S3FileSystem(**options).mkdir(bucket)
    return Store(f"s3://{bucket}/prefix", options)


def write(states: StateStore, version: int, value: float = 0.0, **metrics: float) -> str:
    weights = {"w": torch.full((300,), value)}
    taken = take_state(
        StateMetadata(run="r", version=version, metrics=metrics),
        in_section("weights/", weights),
        torch.device("cpu"),
        HostBuffers(),
    )
    return states.write(taken)


def value_of(found: VerifiedState | None) -> tuple[int, float]:
    assert found is not None
    return found.state.version, SavedState.of(found).read("weights/")["w"][0].item()


@pytest.mark.campaign
def test_s3_states_equal_local_states(store: Store) -> None:
    states = StateStore(store.storage("states"), best="-loss")
    states.storage.check()
    assert newest_state(states.storage) is None
    for version, loss in ((1, 0.1), (2, 0.9), (3, 0.8)):
        assert write(states, version, float(version), loss=loss) == f"{store.url}/states/version-{version}"
    assert states.storage.names() == ["version-1", "version-2", "version-3"], "the best, and the newest two"
    assert value_of(newest_state(store.storage("states"))) == (3, 3.0)
    write(states, 3, 3.5, loss=0.8)
    assert len(states.storage.names("version-3")) == 2, "state.json and the present parts"
    assert value_of(newest_state(store.storage("states"))) == (3, 3.5)
    assert value_of(find_state(f"{store.url}/states/version-2", store.options)) == (2, 2.0)
    assert value_of(find_state(store.url, store.options)) == (3, 3.5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("part", ["state.json", ".metadata", "__0_0.distcp"])
def test_s3_damaged_state_is_skipped(store: Store, part: str, damage: str) -> None:
    states = StateStore(store.storage("states"))
    write(states, 1, 1.0)
    write(states, 2, 2.0)
    (path,) = [path for path in states.storage.fs.find(states.storage.path("version-2")) if path.endswith(part)]
    data = bytearray(states.storage.fs.cat_file(path))
    data[len(data) // 2] ^= 1
    if damage == "remove":
        states.storage.fs.rm_file(path)
    else:
        states.storage.fs.pipe_file(path, bytes(data if damage == "flip" else data[:-1]))
    with capture_logs() as lines:
        assert value_of(newest_state(store.storage("states"))) == (1, 1.0)
    assert [line["state"] for line in lines] == [f"{store.url}/states/version-2"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("delay_objects", [0, 1, 3])
def test_s3_killed_writer_keeps_previous_state(store: Store, delay_objects: int) -> None:
    """The writer is killed after a given number of objects of its third state."""
    storage = store.storage("states")
    with forked(write_endlessly, f"{store.url}/states", store.options, 1_500_000) as writer:
        assert "writing 3" in writer.received()
        while writer.process.is_alive():
            storage.fs.invalidate_cache()
            if len(storage.fs.find(storage.path("version-3"))) >= delay_objects:
                writer.process.kill()
                break
        assert writer.exit_code() == -signal.SIGKILL
    with capture_logs() as lines:
        version, value = value_of(newest_state(storage))
    assert version >= 2
    assert value == float(version)
    unfinished = {line["reason"] for line in lines}
    assert unfinished <= {"it has no state.json"}, "a state with a manifest must be complete"
    states = StateStore(store.storage("states"))
    write(states, version + 1, 9.0)
    assert value_of(newest_state(states.storage)) == (version + 1, 9.0)
    assert states.storage.names() == [f"version-{version}", f"version-{version + 1}"], (
        "all files of the incomplete state are removed"
    )


def test_s3_next_save_removes_incomplete_folders(store: Store) -> None:
    states = StateStore(store.storage("states"))
    for version in (1, 2):
        write(states, version)
    states.storage.fs.pipe_file(states.storage.path("version-3", "abcd", "__0_0.distcp"), b"half of it")
    states.storage.fs.pipe_file(states.storage.path("version-2", "abcd", "__0_0.distcp"), b"of another attempt")
    assert value_of(newest_state(states.storage))[0] == 2
    write(states, 4)
    assert states.storage.names() == ["version-2", "version-4"]


def test_s3_export_writes_config_last(store: Store, tiny: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, storage = tiny(), store.storage("checkpoints")
    weights = {name: tensor.clone() for name, tensor in version_tensors(model).items()}
    for _ in range(2):
        assert export_hf(model, None, storage, "step-3", weights=weights) == f"{store.url}/checkpoints/step-3"
    storage.fs.get(storage.path("step-3"), str(tmp_path / "model"), recursive=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(tensor, version_tensors(again)[name]) for name, tensor in weights.items())


def test_s3_missing_bucket_is_one_sentence(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"s3://no-such-bucket/a cannot be written \(.+\): check policy.saving"):
        Storage("s3://no-such-bucket/a", store.options).check()


def test_s3_unreachable_store_is_one_sentence(store: Store) -> None:
    impatient = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 1}}}
    storage = Storage(store.url, {**store.options, **impatient})
    with pytest.raises(
        ConfigError, match=rf"{store.url} cannot be written \(.+\): check policy.saving and the storage"
    ):
        storage.check()
    with pytest.raises(ConfigError, match=rf"{store.url}/version-1 cannot be written \(.+\): check policy.saving"):
        write(StateStore(storage), 1)
    with pytest.raises(ConfigError, match=rf"{store.url} cannot be listed \(.+\): check policy.saving"):
        newest_state(storage)


@pytest.mark.parametrize("name", ["../../escaped", "inner/../../escaped", "..", "/escaped"])
def test_folder_with_keys_that_lead_out_of_it_is_not_fetched(store: Store, tmp_path: Path, name: str) -> None:
    checkpoints = store.storage("checkpoints")
    checkpoints.fs.pipe_file(checkpoints.path("step-2", "inner", "config.json"), b"{}")
    target = tmp_path / "a" / "target"
    target.mkdir(parents=True)
    checkpoints.fetch(target, "step-2")
    assert (target / "inner" / "config.json").read_bytes() == b"{}"
    checkpoints.fs.pipe_file(checkpoints.path("step-2", name), b"hostile")
    checkpoints.fs.invalidate_cache()
    with pytest.raises(ConfigError, match="which is no file in it"):
        checkpoints.fetch(target, "step-2")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [target / "inner" / "config.json"]


@pytest.mark.parametrize("kind", ["link", "folder", "checkpoint", "fifo"])
@pytest.mark.timeout(60)
def test_folder_with_links_is_not_fetched(kind: str, tmp_path: Path) -> None:
    # An exported model is shared with others, and the keys that a link leads to are not.
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "controller.json").write_text("secret")
    folder = tmp_path / "checkpoints" / "step-2"
    folder.parent.mkdir()
    if kind == "checkpoint":
        folder.symlink_to(tmp_path / "keys")
    else:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    if kind == "link":
        (folder / "notes.txt").symlink_to(tmp_path / "keys" / "controller.json")
    elif kind == "folder":
        (folder / "notes.txt").symlink_to(tmp_path / "keys")
    elif kind == "fifo":
        os.mkfifo(folder / "notes.txt")
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ConfigError, match=r"step-2\S* cannot be read \(it is (a symbolic link|not a regular file)\)"):
        Storage(str(tmp_path / "checkpoints")).fetch(target, "step-2")
    assert {path.name for path in target.iterdir()} <= {"config.json"}
