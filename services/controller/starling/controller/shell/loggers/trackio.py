"""Trackio logger: a local SQLite database in the folder `TRACKIO_DIR`, by default in the user's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starling.controller.shell.loggers.logger import Row, RunInfo


class TrackioLogger:
    """One trackio run, without trackio's machine metrics, which would need a thread each."""

    def __init__(self, run: RunInfo, first_step: int) -> None:
        """Begin or resume the run of this id; `first_step` is not needed."""
        import trackio

        del first_step
        self._run = trackio.init(
            project=run.project,
            name=run.id or run.name,
            resume="allow",
            config=run.settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Log the samples as a table of this step."""
        import trackio

        columns = list(dict.fromkeys(name for row in rows for name in row))
        data = [[row.get(column) for column in columns] for row in rows]
        self._run.log({"samples": trackio.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
