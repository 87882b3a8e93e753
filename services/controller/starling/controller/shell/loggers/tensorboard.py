"""TensorBoard logger: event files in the folder `tensorboard` of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starling.controller.shell.loggers.logger import Row, RunInfo

FOLDER = "tensorboard"


class TensorboardLogger:
    """Writes event files through the `tensorboard` package, without torch or tensorflow."""

    def __init__(self, run: RunInfo, first_step: int) -> None:
        """Begin an event file; TensorBoard hides `first_step` and later steps of earlier files."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / FOLDER))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar for each metric."""
        from tensorboard.compat.proto import summary_pb2

        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, values)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Write the samples as text, each as an indented JSON block, which Markdown does not interpret."""
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        values = []
        for number, row in enumerate(rows):
            text = "    " + json.dumps(row, indent=2, ensure_ascii=False).replace("\n", "\n    ")
            tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()])
            metadata = summary_pb2.SummaryMetadata(plugin_data=plugin)
            values.append(summary_pb2.Summary.Value(tag=f"samples/{number}", metadata=metadata, tensor=tensor))
        self._write(step, values)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _write(self, step: int, values: list[Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        summary = summary_pb2.Summary(value=values)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()
