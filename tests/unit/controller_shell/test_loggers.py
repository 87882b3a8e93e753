"""The real loggers, whose output is read back with their own libraries, without a network."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from starling.common.errors import ConfigError
from starling.controller.shell.loggers.custom import import_logger
from starling.controller.shell.loggers.fanout import makers
from starling.controller.shell.loggers.logger import RunInfo
from starling.controller.shell.loggers.tensorboard import FOLDER, TensorboardLogger
from starling.controller.shell.loggers.wandb import WandbLogger, run_id

ROWS = [{"prompt": "2 + 2 =", "completion": "</pre> 4", "reward": 1.0}, {"prompt": "?", "reward": None}]


def info(folder: Path, **changes: Any) -> RunInfo:
    """Return a run whose files are in `folder`."""
    return RunInfo(id="demo/attempt-1/0badcafe", name="demo", folder=folder, settings={"run": {"seed": 3}}, **changes)


# --- tensorboard ---------------------------------------------------------------------------------------------------


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    """Scalars have their steps, samples are text; steps repeated after a crash are there once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorboardLogger(info(tmp_path), 1)
    for step in (1, 2, 3):
        first.log(step, {"loss": 1 / step, "score/x": math.nan})
    first.table(3, ROWS)
    again = TensorboardLogger(info(tmp_path), 3)  # step 3 was logged, and its mark was not written
    again.log(3, {"loss": 1 / 3})
    again.log(4, {"loss": 0.25})
    for logger in (first, again):
        logger.close()
    found = EventAccumulator(str(tmp_path / FOLDER)).Reload()
    assert [(event.step, round(event.value, 4)) for event in found.Scalars("loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.3333),
        (4, 0.25),
    ]
    assert all(math.isnan(event.value) for event in found.Scalars("score/x"))
    assert json.loads(found.Tensors("samples/0")[0].tensor_proto.string_val[0]) == ROWS[0]


# --- wandb ---------------------------------------------------------------------------------------------------------


def wandb_records(path: Path) -> Iterator[Any]:
    """Read a `.wandb` file: a LevelDB log (blocks of 32 KiB, records of checksum, length, kind) of protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header begins in the last bytes of a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_wandb_keeps_the_run_offline(tmp_path: Path) -> None:
    """The run has its id and settings; evaluations of an earlier version may arrive later."""
    logger = WandbLogger(info(tmp_path, offline=True), 1)
    logger.log(1, {"loss": 0.5})
    logger.log(2, {"loss": 0.25})
    logger.log(1, {"eval/reward_mean": 0.75})
    logger.table(2, ROWS)
    logger.close()
    [path] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(path))
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name, run.project) == ("demo-attempt-1-0badcafe", "demo", "starling")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["run"] == {"seed": 3}
    history = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    logged = [(row["step"], row.get("loss"), row.get("eval/reward_mean")) for row in history]
    assert logged == [(1, 0.5, None), (2, 0.25, None), (1, None, 0.75), (2, None, None)]
    [table] = tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json")
    assert json.loads(table.read_text())["columns"] == ["prompt", "completion", "reward"]


def test_wandb_run_id_has_no_slash() -> None:
    """The rest is unchanged, so that a resumed run is the same run."""
    assert run_id("demo/attempt-1/0badcafe") == "demo-attempt-1-0badcafe"


# --- trackio -------------------------------------------------------------------------------------------------------

TRACKIO = """
import json, sys
from pathlib import Path
from starling.controller.shell.loggers.logger import RunInfo
from starling.controller.shell.loggers.trackio import TrackioLogger
run = RunInfo(id="demo/attempt-1/0badcafe", name="demo", folder=Path("."), settings={"run": {"seed": 3}})
for steps in ((1, 2), (3,)):  # the second one takes the run up again
    logger = TrackioLogger(run, steps[0])
    for step in steps:
        logger.log(step, {"loss": 1 / step})
    logger.close()
logger = TrackioLogger(run, 4)
logger.table(3, json.loads(sys.argv[1]))
logger.close()
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([SQLiteStorage.get_runs("starling"), SQLiteStorage.get_logs("starling", run.id)]))
"""


def test_trackio_has_the_run_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a separate process, because trackio reads the location of its database when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = [sys.executable, "-c", TRACKIO, json.dumps(ROWS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    runs, logs = json.loads(line)
    assert runs == ["demo/attempt-1/0badcafe"]
    assert [(one["step"], one["loss"]) for one in logs if "loss" in one] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    [table] = [one["samples"]["_value"] for one in logs if "samples" in one]
    assert table[0] == ROWS[0]


# --- user loggers --------------------------------------------------------------------------------------------------

OWN = '''
"""User loggers."""
seen = []
def log(step, metrics):
    seen.append((step, dict(metrics)))
class Full:
    def __init__(self):
        self.calls = []
        seen.append(self.calls)
    def log(self, step, metrics):
        self.calls.append(("log", step))
    def table(self, step, rows):
        self.calls.append(("table", step, len(rows)))
    def close(self):
        self.calls.append(("close",))
class Nothing:
    pass
ready = Full()
number = 3
'''


def test_import_logger_takes_functions_classes_and_objects(tmp_path: Path) -> None:
    """A function gets metrics only; a class is instantiated at the start of the run; an object is used as it is."""
    (tmp_path / "mine.py").write_text(OWN)
    for name in ("log", "Full", "ready"):
        logger = import_logger(f"{tmp_path}/mine.py:{name}")()
        logger.log(1, {"loss": 0.5})
        logger.table(1, ROWS)
        logger.close()
        seen = logger._log.__globals__["seen"]  # type: ignore[attr-defined]
        if name == "log":
            assert seen[-1] == (1, {"loss": 0.5})
        else:
            made = seen[-1] if name == "Full" else seen[0]
            assert made == [("log", 1), ("table", 1, 2), ("close",)]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere.py:log", "there is no file '.*nowhere.py'"),
        ("no_such_module:log", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("{folder}/broken.py:log", "cannot be imported: ZeroDivisionError: division by zero"),
        ("{folder}/mine.py:logg", "no 'logg' in there; did you mean 'log'"),
        ("{folder}/mine.py:Nothing", "is not a logger: give a function of step and metrics, or a class or an object"),
        ("{folder}/mine.py:number", "is not a logger: give a function"),
    ],
)
def test_import_logger_rejects_other_objects(tmp_path: Path, name: str, sentence: str) -> None:
    """At the start, before any work."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=sentence) as raised:
        makers([name.format(folder=tmp_path)], info(tmp_path))
    assert "\n" not in str(raised.value)


# --- the names in a recipe -----------------------------------------------------------------------------------------


def test_makers_reject_unknown_and_repeated_names(tmp_path: Path) -> None:
    """Known names are resolved without imports; others are rejected in one sentence each."""
    assert list(makers(["tensorboard", "wandb", "trackio"], info(tmp_path))) == ["tensorboard", "wandb", "trackio"]
    with pytest.raises(ConfigError, match=r"names 'tensorbord', which is not a logger; did you mean tensorboard\?"):
        makers(["tensorbord"], info(tmp_path))
    with pytest.raises(ConfigError, match="names 'wandb' twice; remove one"):
        makers(["wandb", "wandb"], info(tmp_path))


def test_makers_reject_a_missing_package(tmp_path: Path) -> None:
    """At the start, and only if the recipe names the logger."""
    code = (
        "import sys; sys.modules['wandb'] = None\n"
        "from pathlib import Path\n"
        "from starling.controller.shell.loggers.fanout import makers\n"
        "from starling.controller.shell.loggers.logger import RunInfo\n"
        "run = RunInfo(id='a', name='a', folder=Path('.'))\n"
        "makers(['tensorboard'], run)\n"
        "try: makers(['wandb'], run)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == (
        "ConfigError logging.loggers names wandb, which is not installed; "
        "pip install 'starling-controller[wandb]', or remove it"
    ), done.stderr
