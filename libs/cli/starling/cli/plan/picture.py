"""Picture of a plan: bytes from each sender to each receiver, as lines for few pairs, as a heat map for many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from starling.common.errors import ConfigError
from starling.weightsync.plan.boxes import Ints
from starling.weightsync.plan.fan_out import PUBLISHER, FanOut
from starling.weightsync.plan.layout import Place
from starling.weightsync.plan.planner import Plan

MAX_RANKS: Final = 32
"""With more ranks, hosts are drawn instead."""
MAX_LINES: Final = 64
MAX_LABELS: Final = 48
"""With more nodes, only some of them are labelled."""
BLUE: Final = "#3b6fb6"


def draw(plan: Plan, fan_out: FanOut, sources: Sequence[Place], destinations: Sequence[Place], path: Path) -> None:
    """Write the picture, as SVG or PNG by the ending of `path`.

    With one replica, its ranks or hosts receive; with several, the replicas do, and they send to each other too.

    Args:
        plan: to one replica.
        fan_out: how the replicas serve each other.
        sources: where the source's ranks run.
        destinations: where the ranks of the first replica run.
        path: where to.

    Raises:
        ConfigError: another ending, or a path that cannot be written.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path} is not a picture that can be drawn; end its name in .svg or .png")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    senders, receivers, flow = _flow(plan, fan_out, sources, destinations)
    lines = fan_out.num_replicas == 1 and np.count_nonzero(flow) <= MAX_LINES
    tall = max(len(senders), len(receivers)) if lines else len(senders)
    figure = Figure(figsize=(9.0, max(3.0, 0.22 * min(tall, MAX_LABELS) + 1.5)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    (_draw_lines if lines else _draw_shades)(axes, senders, receivers, flow)
    whom = f"each of {fan_out.num_replicas} replicas" if fan_out.num_replicas > 1 else plan.destination
    axes.set_title(f"{plan.source} to {whom}: {plan.total_bytes / 1e9:,.2f} GB")
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _flow(
    plan: Plan, fan_out: FanOut, sources: Sequence[Place], destinations: Sequence[Place]
) -> tuple[list[str], list[str], Ints]:
    """Return the names of senders and receivers, and the bytes between them."""
    senders, rows = _nodes(sources)
    count = fan_out.num_replicas
    if count == 1:
        receivers, columns = _nodes(destinations)
        return senders, receivers, _summed(plan.pair_bytes, rows, columns)
    receivers = [f"replica {number}" for number in range(count)]
    whole = _summed(plan.pair_bytes, rows, [0] * plan.pair_bytes.shape[1])[:, 0]
    flow = np.zeros((len(senders) + count, count), np.int64)
    for replica, source in enumerate(fan_out.sources):
        if source == PUBLISHER:
            flow[: len(senders), replica] = whole
        else:
            flow[len(senders) + source, replica] = plan.total_bytes
    return [*senders, *receivers], receivers, flow


def _draw_lines(axes: Any, senders: Sequence[str], receivers: Sequence[str], flow: Ints) -> None:
    """Draw senders on the left, receivers on the right, and a line for each pair, wider for more bytes."""
    sides = [np.linspace(1, 0, len(names)) if len(names) > 1 else np.array([0.5]) for names in (senders, receivers)]
    most = max(int(flow.max(initial=0)), 1)
    for a, b in zip(*np.nonzero(flow), strict=True):
        share = float(flow[a, b]) / most
        axes.plot([0, 1], [sides[0][a], sides[1][b]], color=BLUE, alpha=0.2 + 0.6 * share, linewidth=0.5 + 4 * share)
    for x, names, heights, side in ((-0.02, senders, sides[0], "right"), (1.02, receivers, sides[1], "left")):
        axes.plot([round(x)] * len(names), heights, "o", color="black", markersize=3)
        for name, height in zip(names, heights, strict=True):
            axes.text(x, height, name, ha=side, va="center", fontsize=8)
    axes.set_xlim(-0.35, 1.35)
    axes.axis("off")


def _draw_shades(axes: Any, senders: Sequence[str], receivers: Sequence[str], flow: Ints) -> None:
    """Draw a heat map: a row for each sender, a column for each receiver, darker for more bytes."""
    image = axes.imshow(np.where(flow, flow / 1e9, np.nan), cmap="viridis_r", aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="GB")
    for names, place in ((senders, axes.set_yticks), (receivers, axes.set_xticks)):
        ticks = range(0, len(names), -(-len(names) // MAX_LABELS))
        place(ticks, [names[tick] for tick in ticks], fontsize=7)
    axes.tick_params(axis="x", rotation=90)
    axes.set_ylabel("from")
    axes.set_xlabel("to")


def _nodes(places: Sequence[Place]) -> tuple[list[str], list[int]]:
    """Return the names of the nodes to draw, and the node of each rank."""
    if len(places) <= MAX_RANKS or not all(place.host for place in places):
        names = [f"{rank}: {p.host} {p.device}" if p.host else f"rank {rank}" for rank, p in enumerate(places)]
        return names, list(range(len(places)))
    hosts: dict[str, int] = {}
    numbers = [hosts.setdefault(place.host, len(hosts)) for place in places]
    return list(hosts), numbers


def _summed(pairs: Ints, rows: Sequence[int], columns: Sequence[int]) -> Ints:
    """Return bytes between ranks as bytes between nodes."""
    total = np.zeros((max(rows, default=-1) + 1, max(columns, default=-1) + 1), np.int64)
    np.add.at(total, (np.array(rows)[:, None], np.array(columns)[None, :]), pairs)
    return total
