"""`samples.jsonl`: complete lines in bounded space."""

from __future__ import annotations

import json
from pathlib import Path

from starling.controller.shell.outputs.samples import OLD_SAMPLES, SAMPLES, Samples


def steps_in(path: Path) -> list[int]:
    """Return the steps of a file's lines."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_samples_are_lines_with_their_step(tmp_path: Path) -> None:
    """Another incarnation appends to them."""
    for step in (1, 2):
        samples = Samples(tmp_path, 1 << 20)
        samples.write(step, [{"completion": "größer\n"}, {"completion": "b"}])
        samples.close()
    lines = [json.loads(line) for line in (tmp_path / SAMPLES).read_text().splitlines()]
    assert lines[0] == {"step": 1, "completion": "größer\n"}
    assert steps_in(tmp_path / SAMPLES) == [1, 1, 2, 2]


def test_samples_are_rotated_in_bounded_space(tmp_path: Path) -> None:
    """Two files of at most half the space, up to a step; also over a restart."""
    most = 4000
    row = {"completion": "x" * 180}
    for begin in (0, 50):
        samples = Samples(tmp_path, most)
        for step in range(begin, begin + 50):
            samples.write(step, [row])
        samples.close()
    files = [tmp_path / OLD_SAMPLES, tmp_path / SAMPLES]
    assert sum(path.stat().st_size for path in files) <= most + 2 * 250
    kept = [step for path in files for step in steps_in(path)]
    assert kept == list(range(kept[0], 100))
    assert len(kept) >= 8
