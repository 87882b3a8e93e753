"""Forecast of a weight synchronisation: bytes, duration and memory, computed without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from starling.cli.plan.sizes import size_text
from starling.common.counts import counted
from starling.common.errors import ConfigError, WeightsError
from starling.weightsync.costs.estimate import NUM_SNAPSHOTS, Estimate, estimate, estimate_fan_out
from starling.weightsync.costs.pairs import COPY_GB_PER_S, PCIE_GB_PER_S
from starling.weightsync.layouts.presets import PRESETS
from starling.weightsync.layouts.symbolic import compact_layout, model_layout
from starling.weightsync.places.machine import Machine, find_machine
from starling.weightsync.plan.compact import CompactLayout, to_compact
from starling.weightsync.plan.fan_out import FanOut, for_relays, make_fan_out
from starling.weightsync.plan.layout import Layout, Place, decode_layout, encode
from starling.weightsync.plan.planner import Plan, make_plan
from starling.weightsync.plan.topology import HostSpec, Nic, Topology, decode_topology
from starling.weightsync.quantise.layouts import (
    packing_bytes,
    published_layout,
    published_splits,
    received_layout,
    received_splits,
)
from starling.weightsync.quantise.recipe import QuantRecipe, linear_weights

MAX_BUCKET_MIB: Final = 1024
FOUND: Final = Path("found")
"""In place of a file of the topology: this machine, as it is detected."""
GPUS_PER_HOST = 8
"""GPUs of each host that is assumed when no topology is given; each GPU has a network card of its own."""


@dataclass(frozen=True)
class PlanSide:
    """The source or the destination: one replica's layout, and how many such replicas there are."""

    layout: CompactLayout
    num_replicas: int = 1


class SideRole(NamedTuple):
    """How quantisation changes the layout of a side, as shards or in the compact form."""

    replica: str
    layout: Callable[[Layout, QuantRecipe], Layout]
    splits: Callable[[CompactLayout, QuantRecipe], CompactLayout]


SOURCE: Final = SideRole("policy-0", published_layout, published_splits)
DESTINATION: Final = SideRole("rollout-0", received_layout, received_splits)


@dataclass(frozen=True)
class SyncForecast:
    """Plan of a synchronisation, and its estimated duration and memory."""

    source: CompactLayout
    destination: CompactLayout
    replicas: tuple[tuple[Place, ...], ...]
    """Where the ranks of each destination replica run."""
    plan: Plan
    """To one replica."""
    estimate: Estimate
    """To all replicas, which relay to each other."""
    one: Estimate
    """To one replica alone."""
    fan_out: FanOut
    """Which replica serves which."""


def print_forecast(
    source: str,
    destination: str,
    *,
    model: str,
    dtype: str,
    quantise: str,
    topology: Path | None,
    bucket_mib: float,
    num_rows: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Print the forecast as a table or as JSON, and draw it to `picture`.

    Raises:
        ConfigError: arguments that do not fit together, a layout, parallelism or topology that is not valid, or a file
            that cannot be read.
    """
    if not 0 < bucket_mib <= MAX_BUCKET_MIB:
        raise ConfigError(
            f"--bucket-mib {bucket_mib:g} is out of range; give a number above 0, at most {MAX_BUCKET_MIB}"
        )
    if num_rows < 0:
        raise ConfigError(f"--rows {num_rows} is not a number of rows; give one from 0 on")
    try:
        machine = find_machine() if topology == FOUND else None
        forecast = forecast_sync(
            source,
            destination,
            config=read_config(model) if model else None,
            dtype=dtype,
            recipe=linear_weights(quantise) if quantise else None,
            topology=decode_topology(_read(topology).decode()) if topology and machine is None else None,
            machine=machine,
            bucket_bytes=int(bucket_mib * (1 << 20)),
        )
    except WeightsError as error:
        raise ConfigError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--topology {topology} is not text: {error}; give a TOML file") from None
    if as_json:
        found = {} if machine is None else {"found": describe(machine)}
        print(json.dumps({**to_json(forecast), **found}))
    else:
        if machine is not None:
            print(found_text(machine), end="\n\n")
        print(to_text(forecast, num_rows))
    if picture:
        from starling.cli.plan.picture import draw

        draw(forecast.plan, forecast.fan_out, forecast.source.places, forecast.destination.places, picture)


def forecast_sync(
    source: str,
    destination: str,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: str = "",
    recipe: QuantRecipe | None = None,
    topology: Topology | None = None,
    machine: Machine | None = None,
    bucket_bytes: int = 32 << 20,
) -> SyncForecast:
    """Plan and estimate.

    Args:
        source: a parallelism such as `fsdp256`, or the path of an encoded layout.
        destination: likewise; `tp8 x16` means 16 replicas.
        config: contents of the model's `config.json`, for parallelisms.
        dtype: element type of the weights; by default the configuration's.
        recipe: how the source quantises the weights.
        topology: the machines; by default hosts of eight GPUs with a card of 50 GB/s each.
        machine: the only machine, in place of a topology.
        bucket_bytes: size of a bucket.

    Raises:
        ConfigError: as `print_forecast`.
        WeightsError: as `print_forecast`.
    """
    held = _side(source, SOURCE, config, dtype, recipe)
    wanted = _side(destination, DESTINATION, config, dtype, recipe)
    num_sources, num_ranks = len(held.layout.places), len(wanted.layout.places)
    if held.num_replicas > 1:
        raise ConfigError(f"the source {source!r} is {held.num_replicas} replicas, expected one: copies are hsdp or dp")
    needed = num_sources + num_ranks * wanted.num_replicas
    if machine is not None:
        machines, places = _on(machine, needed)
    else:
        machines = topology or _machines(num_sources, num_ranks * wanted.num_replicas)
        places = machines.places()
    if len(places) < needed:
        raise ConfigError(
            f"the topology has {counted(len(places), 'GPU')}, but {source!r} and {destination!r} need {needed}"
        )
    # The assumed hosts belong to the source or to the destination, never to both.
    first = num_sources if topology or machine else -(-num_sources // GPUS_PER_HOST) * GPUS_PER_HOST
    sources = _placed(held.layout, places[:num_sources])
    replicas = tuple(
        tuple(places[first + replica * num_ranks : first + (replica + 1) * num_ranks])
        for replica in range(wanted.num_replicas)
    )
    target = _placed(wanted.layout, replicas[0])
    if wanted.num_replicas == 1:
        replicas = (target.places,)
    plan = make_plan(sources, target, topology=machines, bucket_bytes=bucket_bytes)
    one = estimate(plan, sources.places, replicas[0], machines)
    fan_out = make_fan_out(replicas, sources.places)
    relayed = for_relays(plan) if wanted.num_replicas > 1 else plan
    every = estimate_fan_out(relayed, fan_out, sources.places, replicas, machines)
    return SyncForecast(sources, target, replicas, plan, every, one, fan_out)


def describe(machine: Machine) -> dict[str, Any]:
    """Return what was detected of a machine, as JSON values."""
    return {
        "host": machine.host,
        "NUMA nodes": len(machine.nodes),
        "GPUs": [f"{gpu.uuid} at {gpu.pci}, NUMA node {gpu.numa}" for gpu in machine.gpus],
        "network cards": [
            f"{one.card.name}, {one.card.gb_per_s or 'unknown'} GB/s, NUMA node {one.numa}" for one in machine.cards
        ],
        "switch": machine.switch or "unknown",
    }


def found_text(machine: Machine) -> str:
    """Return what was detected of a machine, one line each."""
    texts = {
        name: "; ".join(what) or "none" if isinstance(what, list) else what for name, what in describe(machine).items()
    }
    return "\n".join(f"{name:<14} {text}" for name, text in texts.items())


def to_json(forecast: SyncForecast) -> dict[str, Any]:
    """Return the forecast as JSON values."""
    pairs = forecast.plan.pair_bytes
    return {
        "replicas": len(forecast.replicas),
        "plan_bytes": len(encode(forecast.plan)),
        "snapshots_bytes": _snapshots(forecast.source),
        "packing_bytes": int(packing_bytes(forecast.destination).max(initial=0)),
        "estimate": msgspec.to_builtins(forecast.estimate),
        "one_replica": msgspec.to_builtins(forecast.one),
        "pairs": [[int(a), int(b), int(pairs[a, b])] for a, b in zip(*np.nonzero(pairs), strict=True)],
    }


def to_text(forecast: SyncForecast, num_rows: int) -> str:
    """Return the forecast as a page; `num_rows` of each table."""
    found, plan = forecast.estimate, forecast.plan
    count, packed = len(forecast.replicas), int(packing_bytes(forecast.destination).max(initial=0))
    copies = f" x {count} replicas" if count > 1 else ""
    lines = [
        f"{plan.source} ({counted(len(forecast.source.places), 'rank')}) -> {plan.destination} "
        f"({counted(len(forecast.destination.places), 'rank')}{copies})",
        "",
        f"moved             {size_text(found.total_bytes)}",
        f"publisher sends   {size_text(found.publisher_bytes)}",
        f"peak staging      {size_text(found.peak_staging_bytes)} on a rank ({size_text(_in_place(plan))} in place)",
        f"snapshots         {size_text(_snapshots(forecast.source))} on a rank of the source, besides packed weights",
        f"plan              {size_text(len(encode(plan)))}, {len(plan.moves)} classes of tensors",
        "",
        f"expected          {_time(found.seconds)}",
        f"  packing         {_time(found.pack_s)}",
        f"  wire            {_time(found.wire_s)}",
        f"  unpacking       {_time(found.unpack_s)}",
        f"  waiting         {_time(found.wait_s)}",
        f"switch            {_time(found.switch_s)} (the engine pauses)",
    ]
    if packed:
        lines.append(f"repacking         {size_text(packed)} on a rank of vllm: one layer, during the switch")
    if count > 1:
        lines.append(f"one replica       {_time(forecast.one.seconds)}")
    lines += ["", "distance   bytes"]
    lines += [f"{name:<10} {size_text(num_bytes)}" for name, num_bytes in found.link_bytes.items() if num_bytes]
    lines += ["", f"{'link':<32} {'bytes':>12} {'time':>12}"]
    lines += [
        f"{link.link:<32} {size_text(link.num_bytes):>12} {_time(link.seconds):>12}" for link in found.links[:num_rows]
    ]
    pairs = plan.pair_bytes
    largest = np.argsort(-pairs, axis=None, kind="stable")[:num_rows]
    lines += ["", f"{'from rank':>9} {'to rank':>9} {'bytes':>12}   (to one replica)"]
    for a, b in zip(*np.unravel_index(largest, pairs.shape), strict=True):
        if pairs[a, b]:
            lines.append(f"{a:>9} {b:>9} {size_text(int(pairs[a, b])):>12}")
    hidden = int((pairs > 0).sum()) - min(num_rows, int((pairs > 0).sum()))
    return "\n".join([*lines, *([f"... and {hidden} pairs more"] if hidden else [])])


def _in_place(plan: Plan) -> int:
    return max((plan.peak_bytes(rank, in_place=True) for rank in plan.ranks), default=0)


def _snapshots(source: CompactLayout) -> int:
    return NUM_SNAPSHOTS * int(source.piece_bytes.max(initial=0))


def _side(
    text: str, role: SideRole, config: Mapping[str, Any] | None, dtype: str, recipe: QuantRecipe | None
) -> PlanSide:
    path = Path(text)
    if path.is_file():
        held = decode_layout(_read(path))
        return PlanSide(to_compact(role.layout(held, recipe) if recipe else held))
    if config is None:
        raise ConfigError(f"{text!r} is not a file; a parallelism such as 'fsdp256' needs the model too: --model NAME")
    layout = model_layout(config, text, dtype=dtype)
    splits = compact_layout(layout, role.replica)
    return PlanSide(role.splits(splits, recipe) if recipe else splits, layout.parallelism.num_replicas)


def _placed(layout: CompactLayout, places: Sequence[Place]) -> CompactLayout:
    """Return `layout` at `places`, unless it has places of its own."""
    if any(place.host for place in layout.places):
        return layout
    return CompactLayout(layout.replica, layout.tensors, tuple(places), layout.splits, layout.split_of, layout.orders)


def _on(machine: Machine, needed: int) -> tuple[Topology, tuple[Place, ...]]:
    """Return the bandwidths inside a machine, and the places of its ranks: its GPUs, or its processor for all."""
    copy = PCIE_GB_PER_S if machine.gpus else COPY_GB_PER_S
    places = tuple(machine.place_on(gpu) for gpu in machine.gpus) or (machine.place(),) * needed
    return Topology(device_gb_per_s=copy, host_gb_per_s=copy), places


def _machines(num_sources: int, num_destinations: int) -> Topology:
    nic = Nic(name="nic-{}", rail="rail-{}", gb_per_s=50.0, count=GPUS_PER_HOST)
    groups = (("trainer-{}", num_sources), ("engine-{}", num_destinations))
    return Topology(
        hosts=tuple(
            HostSpec(name=name, count=-(-ranks // GPUS_PER_HOST), gpus=GPUS_PER_HOST, numas=2, nics=(nic,))
            for name, ranks in groups
        )
    )


def read_config(model: str) -> Mapping[str, Any]:
    """Return the configuration that `--model` names. Raises ConfigError if there is none."""
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{model!r} is neither a file nor a known model; known: {', '.join(sorted(PRESETS))}")
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not a configuration")
    return config


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
