"""Weights & Biases logger. A resumed run continues the same wandb run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starling.controller.shell.loggers.logger import Row, RunInfo


class WandbLogger:
    """One wandb run, with the metric `step` as the x axis.

    wandb's own step must not decrease, but an evaluation of a version ends after later steps, so it is not used.
    """

    def __init__(self, run: RunInfo, first_step: int) -> None:
        """Begin or resume the run of this id; `first_step` is not needed, because entries may come in any order."""
        import wandb

        del first_step
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id(run.id),
            resume="allow",
            dir=run.folder,
            config=run.settings,
            mode="offline" if run.offline else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        self._run.log({**metrics, "step": step})

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Log the samples as a table of this step."""
        import wandb

        columns: list[str | int] = list(dict.fromkeys(name for row in rows for name in row))
        data: list[list[Any]] = [[row.get(str(column)) for column in columns] for row in rows]
        table = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log({"samples": table, "step": step})

    def close(self) -> None:
        """Finish the run and wait for wandb's service process."""
        import wandb

        self._run.finish()
        wandb.teardown()


def run_id(run: str) -> str:
    """Return the id of a run as wandb accepts it, without slashes."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", run)
