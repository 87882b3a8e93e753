"""States of a mesh: one that was saved under a layout is loaded under every other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from small_steps import Array, Variant, make_groups, make_model, make_settings, prepare

from starling.common.errors import ConfigError
from starling.common.folder_digests import DIGESTS
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.checkpoint.header import find_state
from starling.policy.train.checkpoint.huggingface import SHARD_MB, save_hf
from starling.policy.train.checkpoint.shared_export import ExportFiles
from starling.policy.train.checkpoint.state import PartsSnapshot, SavedState, StateSnapshot, StateStore
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.learner import Learner
from starling.policy.train.parallel.mesh import Mesh

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "fsdp": {"dp_shard": 2},
    "tp": {"tp": 2},
    "ddp": {"dp_replicate": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp and tp": {"dp_shard": 2, "tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "ep": {"dp_shard": 2, "ep": 2},
    "ep and tp": {"dp_shard": 2, "tp": 2, "ep": 4},
    "zbv": {"pp": 2, "schedule": "zbv"},
    "fp8": {},
    "fsdp and fp8": {"dp_shard": 2},
}
PRECISION: dict[str, dict[str, Any]] = {
    "fp8": {"kind": "fp8_rowwise"},
    "fsdp and fp8": {"kind": "fp8_tensorwise", "fsdp_all_gather": True},
}
"""Of layouts that multiply in FP8; their states have the same tensors."""
SHALLOW = tuple(layout for layout in LAYOUTS if layout != "zbv" and layout not in PRECISION)
"""Those for a model of two blocks."""
DENSE = tuple(layout for layout in SHALLOW if not layout.startswith("ep"))
KINDS = [
    ("qwen2_5_vl", torch.float32, ("alone", "fsdp")),
    pytest.param("qwen2_5_vl", torch.float32, ("alone", "tp", "pp"), marks=pytest.mark.campaign),
    pytest.param("deepseek_v3", torch.float32, ("alone", "ep", "fsdp and tp"), marks=pytest.mark.campaign),
    pytest.param("phi3", torch.bfloat16, ("alone", "fsdp and tp"), marks=pytest.mark.campaign),
    ("qwen3", torch.float32, ("alone", "hsdp", "pp")),
    ("qwen3_moe", torch.float32, ("alone", "ep")),
    pytest.param("qwen3_moe", torch.float32, ("alone", "fsdp and tp", "ep"), marks=pytest.mark.campaign),
    ("qwen3", torch.bfloat16, ("alone", "fsdp and tp")),
    ("deep qwen3-tied", torch.float32, ("alone", "zbv")),
    ("qwen3", torch.bfloat16, ("alone", "fsdp and fp8")),
    pytest.param("qwen3", torch.bfloat16, ("alone", "fp8", "fsdp and fp8"), marks=pytest.mark.campaign),
    ("adapted qwen3", torch.float32, ("alone", "fsdp and tp")),
    pytest.param("adapted qwen3", torch.float32, ("alone", "fsdp and tp", "pp"), marks=pytest.mark.campaign),
    pytest.param("qwen3", torch.float32, DENSE, marks=pytest.mark.campaign),
    pytest.param("qwen3", torch.bfloat16, DENSE, marks=pytest.mark.campaign),
    pytest.param("qwen3_moe", torch.bfloat16, SHALLOW, marks=pytest.mark.campaign),
    pytest.param("deep qwen3-tied", torch.float32, ("alone", "pp", "zbv"), marks=pytest.mark.campaign),
    pytest.param("deep qwen3_moe", torch.float32, ("alone", "ep and tp", "zbv"), marks=pytest.mark.campaign),
    pytest.param("adapted qwen3", torch.bfloat16, DENSE, marks=pytest.mark.campaign),
]
QUANTISED = [
    ("wide qwen3 by adamw_8bit", torch.float32, ("alone", "fsdp")),
    pytest.param("wide qwen3_moe by adamw_8bit", torch.float32, ("alone", "ep", "pp"), marks=pytest.mark.campaign),
    pytest.param("qwen3 by muon", torch.float32, ("alone", "fsdp and tp", "pp"), marks=pytest.mark.campaign),
]
"""Models, with the layouts that save and load their states."""
FORMS = (("whole", False, SHARD_MB), ("merged", True, SHARD_MB), ("merged in files", True, 0))
"""Exports: whether adapters are merged, and the size of a file."""
SECTIONS = ("weights/", "trainer/", "reference/", "random/")


def make_learner(layout: str, kind: str, dtype: torch.dtype) -> Learner:
    """Return a learner of one layout; every rank calls this."""
    parallel = LAYOUTS[layout]
    mesh = Mesh(ParallelSettings(**parallel)) if parallel else None
    variant = Variant.of(kind)
    settings = make_settings(kind=variant.optimizer, precision=PRECISION.get(layout), **parallel)

    def load() -> Any:
        loaded = variant.load(dtype=dtype)
        prepare(loaded, settings)
        return loaded

    return Learner(load, settings, mesh=mesh)


def make_step(learner: Learner, step: int) -> dict[str, float]:
    """Make a step with a KL term, whose reference is the version before it once in two steps."""
    changes = {"policy.algorithm.kl_coefficient": 0.1}
    return learner.reinforce(make_groups(seed=step), step=step, num_steps=4, changes=changes)


def save(learner: Learner, folder: Path, version: int) -> None:
    """Save a state, on a mesh by all ranks."""
    snapshot = learner.take_state(version)
    if not isinstance(snapshot, PartsSnapshot):
        StateStore(Storage(str(folder))).write(snapshot)
        return
    storage, parts = Storage(str(folder)), f"{folder}/of-ranks"
    digests = snapshot.write_parts(storage, parts, dist.group.WORLD)
    if dist.get_rank() == 0:
        StateStore(storage).write(_Written(snapshot.state, snapshot.tensors, parts, digests))
    dist.barrier()


class _Written(StateSnapshot):
    """A state whose files are in another folder."""

    def __init__(self, state: Any, tensors: Any, parts: str, digests: dict[str, str]) -> None:
        super().__init__(state, tensors)
        object.__setattr__(self, "_files", (parts, digests))

    def write(self, storage: Storage, path: str) -> dict[str, str]:
        parts, digests = self._files  # type: ignore[attr-defined]
        for name in digests:
            storage.fs.copy(f"{parts}/{name}", f"{path}/{name}")
        return digests  # type: ignore[no-any-return]


def begin(_: int, layout: str, kind: str, dtype: torch.dtype, folder: Path) -> None:
    """Make two steps under a layout, and save the second."""
    learner = make_learner(layout, kind, dtype)
    make_step(learner, 1)
    make_step(learner, 2)
    save(learner, folder / layout, 2)


def go_on(
    _: int, layout: str, kind: str, dtype: torch.dtype, sources: tuple[str, ...], folder: Path
) -> dict[str, dict[str, float]]:
    """Load the states of other layouts under one; save each again, and make the next step from two of them."""
    found = {}
    for source in sources:
        learner = make_learner(layout, kind, dtype)
        assert learner.resume(SavedState.of(find_state(str(folder / source)))) == 2
        save(learner, folder / f"{source} by {layout}", 2)
        if source in ("alone", sources[-1]):
            found[source] = make_step(learner, 3)
    return found


def read_all(folder: Path) -> dict[str, Array]:
    """Return all tensors of a state as bits."""
    saved = SavedState.of(find_state(str(folder)))
    found = {}
    for section in SECTIONS:
        for name, tensor in saved.read(section).items():
            found[section + name] = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return found


def run(layout: str, function: Any, *arguments: Any) -> list[Any]:
    """Call a function on every rank of a layout."""
    parallel = ParallelSettings(**LAYOUTS[layout])
    if parallel.num_ranks == 1:
        return [function(0, layout, *arguments)]
    return run_ranks(parallel.num_ranks, function, layout, *arguments)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "dtype", "layouts"), [*KINDS, *QUANTISED])
def test_state_of_every_layout_is_loaded_under_every_other(
    kind: str, dtype: torch.dtype, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    for layout in layouts:
        run(layout, begin, kind, dtype, tmp_path)
    whole = read_all(tmp_path / "alone")
    names = {name.partition(":")[0] for name in whole if name.startswith("trainer/")}
    assert names == {f"trainer/{field}" for field in fields_of(kind, dtype)}
    for layout in layouts:
        sources = sources_of(layout, layouts, kind)
        outcomes = run(layout, go_on, kind, dtype, sources, tmp_path)
        for source in sources:
            expected, found = read_all(tmp_path / source), read_all(tmp_path / f"{source} by {layout}")
            assert found.keys() == expected.keys() == whole.keys()
            assert [name for name, bits in expected.items() if (bits != found[name]).any()] == []
        for outcome in outcomes:
            for step in outcome.values():
                assert step["loss"] == pytest.approx(outcomes[0]["alone"]["loss"], rel=0.02, abs=1e-4)


def sources_of(layout: str, layouts: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """Return the layouts whose states one loads: all, or its own, that of a single process, and the next two."""
    if len(layouts) <= 3 or kind == "qwen3_moe":
        return layouts
    place = layouts.index(layout)
    near = {layouts[(place + ahead) % len(layouts)] for ahead in range(3)}
    return tuple(one for one in layouts if one == "alone" or one in near)


def fields_of(kind: str, dtype: torch.dtype) -> set[str]:
    """Return the fields of an optimizer's state."""
    variant, moments = Variant.of(kind), {"exp_avg", "exp_avg_sq"}
    found = {"step", "ema"} | moments
    if variant.optimizer == "muon":
        found |= {"momentum"}
    if variant.optimizer == "adamw_8bit":
        found |= {f"{moment}.{part}" for moment in moments for part in ("codes", "scale")}
    # Adapters have all bits themselves.
    return found | ({"master"} if dtype is torch.bfloat16 and variant.adapters is None else set())


def load_other(_: int, folder: Path) -> list[str]:
    """Return what is said of states of another model, and of another optimizer."""
    found = []
    for kind, optimizer in (("qwen2", "adamw"), ("qwen3", "adamw")):
        settings = make_settings(dp_shard=2)
        if kind == "qwen3":
            changed = settings.optimizer.model_copy(update={"ema_decay": 0.0, "kind": optimizer})
            settings = settings.model_copy(update={"optimizer": changed})
        mesh = Mesh(ParallelSettings(dp_shard=2))
        learner = Learner(lambda kind=kind: make_model(kind, False), settings, mesh=mesh)
        with pytest.raises(ConfigError) as caught:
            learner.resume(SavedState.of(find_state(str(folder))))
        found.append(str(caught.value))
    return found


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    begin(0, "alone", "qwen3", torch.float32, tmp_path)
    for model, optimizer in run_ranks(2, load_other, tmp_path / "alone"):
        assert "does not fit: it has model.layers.0.self_attn.k_norm.weight, which this model does not have" in model
        assert "the optimizer of the state" in optimizer
        assert "ema:" in optimizer


def export(_: int, layout: str, kind: str, dtype: torch.dtype, folder: Path) -> None:
    """Export the state of a single process under a layout in all forms."""
    learner = make_learner(layout, kind, dtype)
    learner.resume(SavedState.of(find_state(str(folder / "alone"))))
    for form, merged, shard_mb in FORMS:
        target = folder / f"export by {layout} {form}"
        if learner.parallel is None:
            save_hf(learner.model, None, target, weights=learner.exported(merged=merged), shard_mb=shard_mb)
            continue
        files = ExportFiles(learner.model, learner.parallel.outline, shard_mb, merged=merged)
        if dist.get_rank() == 0:
            target.mkdir()
            files.create(target)
        dist.barrier()
        files.write(target, learner.exported_parts(merged=merged))
        dist.barrier()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "dtype", "layouts"), KINDS)
def test_export_of_every_layout_has_the_bytes_of_a_single_process(
    kind: str, dtype: torch.dtype, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    begin(0, "alone", kind, dtype, tmp_path)
    for layout in layouts:
        run(layout, export, kind, dtype, tmp_path)
    is_adapted = Variant.of(kind).adapters is not None
    for form, merged, shard_mb in FORMS:
        expected = files_of(tmp_path / f"export by alone {form}")
        only_adapters = is_adapted and not merged
        assert ("adapter_model.safetensors" in expected) == only_adapters
        assert only_adapters or sum(name.endswith(".safetensors") for name in expected) >= (1 if shard_mb else 10)
        for layout in layouts:
            found = files_of(tmp_path / f"export by {layout} {form}")
            assert found.keys() == expected.keys()
            assert [name for name, content in expected.items() if found[name] != content] == []


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of an export, without their digests."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != DIGESTS}
