"""The picture of a capacity question: throughput and staleness, a bar for each load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starling.common.errors import ConfigError
from starling.sim.capacity.capacity import CapacityEstimate

BLUE: Final = "#3b6fb6"
RED: Final = "#b6483b"


def draw(answers: Sequence[CapacityEstimate], path: Path) -> None:
    """Write the picture, as SVG or PNG by the ending of `path`.

    Raises:
        ConfigError: another ending, or a path that cannot be written.
    """
    check_path(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.6 + 0.5 * len(answers)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    rows = range(len(answers))
    left.barh(rows, [answer.samples_per_s for answer in answers], color=BLUE)
    left.set_yticks(rows, [answer.label for answer in answers], fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("samples per second")
    right.barh(rows, [answer.staleness_mean for answer in answers], color=RED)
    right.plot([answer.staleness_max for answer in answers], rows, "|", color="black", markersize=12)
    right.set_xlim(left=0)
    right.set_xlabel("staleness in versions: mean, and greatest")
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def check_path(path: Path) -> None:
    """Refuse what can be no picture, before anything is simulated for it.

    Raises:
        ConfigError: the name ends in something else than .svg or .png.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path} is no picture that can be drawn; end its name in .svg or .png")
