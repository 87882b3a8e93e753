"""Chart of capacity estimates: a bar for the throughput and the staleness of each load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starling.common.errors import ConfigError
from starling.sim.capacity.capacity import CapacityEstimate

BLUE: Final = "#3b6fb6"
RED: Final = "#b6483b"


def draw(estimates: Sequence[CapacityEstimate], path: Path) -> None:
    """Write the chart, as SVG or PNG by the suffix of `path`.

    Raises:
        ConfigError: another suffix, or a path that cannot be written.
    """
    check_path(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.6 + 0.5 * len(estimates)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    rows = range(len(estimates))
    left.barh(rows, [estimate.samples_per_s for estimate in estimates], color=BLUE)
    left.set_yticks(rows, [estimate.label for estimate in estimates], fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("samples per second")
    right.barh(rows, [estimate.staleness_mean for estimate in estimates], color=RED)
    right.plot([estimate.staleness_max for estimate in estimates], rows, "|", color="black", markersize=12)
    right.set_xlim(left=0)
    right.set_xlabel("staleness in versions: mean and maximum")
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def check_path(path: Path) -> None:
    """Check the suffix of a chart before anything is simulated for it.

    Raises:
        ConfigError: the suffix is neither .svg nor .png.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path} is not a picture; end its name in .svg or .png")
