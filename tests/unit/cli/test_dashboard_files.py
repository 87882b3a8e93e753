"""What the dashboard reads of a run's files: series in bounded memory, files that grow and rotate, completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import BEGUN, evaluation_line, many_steps, step_line

from starling.cli.dashboard.files.follow import Follower
from starling.cli.dashboard.files.media import MAX_FRAMES, MediaError, frames_of, read_media
from starling.cli.dashboard.files.notices import MAX_CHARACTERS, MAX_NOTICES, NoticeLog
from starling.cli.dashboard.files.record import MAX_EVENTS, MAX_NAMES, RunRecord
from starling.cli.dashboard.files.samples import Filter, SampleIndex, tokens_of
from starling.cli.dashboard.files.series import CAPACITY, Series
from starling.controller.shell.outputs.samples import Samples

ALL = 1 << 40


def whole(series: Series, num: int = 10) -> list[tuple[float, float, float, float]]:
    return series.columns(-1e9, 1e9, num, by_seconds=False)


def test_series_of_many_steps_keeps_extremes_in_bounded_memory() -> None:
    series = Series()
    for step in range(3 * CAPACITY):
        series.add(step, float(step), 100.0 if step == 5000 else float(step % 2))
    assert len(series) <= CAPACITY
    columns = whole(series, 12)
    assert len(columns) == 12
    assert max(high for *_, high in columns) == 100.0
    assert min(low for _, low, _, _ in columns) == 0.0
    assert columns[0][2] == pytest.approx(0.5, abs=0.01)
    xs = [x for x, *_ in columns]
    assert xs == sorted(xs)
    assert xs[-1] < 3 * CAPACITY


def test_series_shows_a_range_exactly() -> None:
    series = Series()
    for step in range(1000):
        series.add(step, 2.0 * step, float(step))
    assert series.columns(500, 502, 100, by_seconds=False) == [(float(i), i, i, i) for i in range(499, 504)]
    assert series.columns(1000, 1004, 100, by_seconds=True)[0] == (998.0, 499.0, 499.0, 499.0)
    assert series.last(2) == 998.5


def test_step_that_comes_again_replaces_those_after_it() -> None:
    series = Series()
    for step in (1, 2, 3, 4, 2):
        series.add(step, 0.0, float(10 * step if step != 2 else 7))
    assert whole(series) == [(1, 10, 10, 10), (2, 7, 7, 7)]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_follower_reads_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert list(follower.lines(ALL)) == []
    append(path, "one\ntw")
    assert [text for _, text in follower.lines(ALL)] == [b"one\n"]
    append(path, "o\nthree\n")
    assert list(follower.lines(ALL)) == [(4, b"two\n"), (8, b"three\n")]
    assert follower.share == 1.0
    follower.close()


def test_follower_begins_again_with_another_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, "one\n")
    follower = Follower(path)
    assert len(list(follower.lines(ALL))) == 1
    append(path, "late\n")
    path.rename(tmp_path / "old")
    append(path, "other\n")
    assert [text for _, text in follower.lines(ALL)] == [b"late\n"], "the renamed file is read to its end"
    assert list(follower.lines(ALL)) == [(0, b"other\n")]
    path.write_text("x\n")
    assert list(follower.lines(ALL)) == [(0, b"x\n")], "a file that was cut off is read anew"
    assert follower.num_begun == 3
    follower.close()


def test_follower_refuses_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic link"):
        list(Follower(tmp_path / "link").lines(ALL))


def record_of(lines: list[dict[str, Any]]) -> RunRecord:
    record = RunRecord()
    for line in lines:
        record.add(line)
    return record


def test_record_has_curves_events_and_publications() -> None:
    published = {"time": BEGUN + 9, "kind": "published", "version": 7, "publish_s": 0.25, "offer_s": 0.5}
    adopted = {
        "time": BEGUN + 9.75,
        "kind": "adopted",
        "replica": "rollout-0",
        "version": 7,
        "pull_s": 0.5,
        "pause_s": 0.1,
    }
    steps = [step_line(step, **{"staleness/0": 0.75, "staleness/1": 0.25}) for step in range(1, 6)]
    record = record_of([*steps, evaluation_line(5, 0.6), published, adopted])
    assert whole(record.series["reward"])[-1] == (5, 0.005, 0.005, 0.005)
    assert record.series["tokens/s"].newest == 500.0
    assert record.evaluations["evaluation reward"].newest == 0.6
    assert record.staleness(0, 10, 50)["newest"] == {0: 0.75, 1: 0.25}
    assert record.staleness(0, 10, 50)["columns"][1][0] == (1, 0.25)
    (publication,) = record.publications
    assert publication.version == 7
    assert publication.adoptions[0]["after_s"] == 0.75
    assert [event["kind"] for event in record.events] == ["evaluation"]


def test_record_takes_any_line_in_bounded_memory() -> None:
    lines: list[dict[str, Any]] = [
        {"kind": 7}, {"kind": "step"}, {"kind": "step", "step": "x"}, {"kind": "step", "step": -1},
        {"kind": "step", "step": 1, "a": float("nan"), "b": 10**400, "c": [1], "d": True, "time": "no"},
        {"kind": "published"}, {"kind": "published", "version": 1}, {"kind": "adopted", "version": {}},
        {"kind": "alarm", "text": "x" * 100_000, **{f"k{i}": i for i in range(1000)}},
    ]  # fmt: skip
    lines += [{"kind": "alarm", "name": str(i)} for i in range(2 * MAX_EVENTS)]
    lines += [{"kind": "step", "step": 2, **{f"name{i}": 1.0 for i in range(2 * MAX_NAMES)}}]
    record = record_of(lines)
    assert len(record.events) == MAX_EVENTS
    assert len(record.series) == MAX_NAMES
    assert not {"a", "b", "c", "d"} & record.series.keys()
    assert all(len(event["text"]) <= 12 for event in record.events)


def test_record_of_a_long_run_is_small() -> None:
    record = record_of(list(many_steps(9000)))
    assert record.newest_step == 9000
    assert len(record.series["reward"]) <= CAPACITY
    assert max(high for *_, high in whole(record.series["reward"], 480)) == pytest.approx(5.5, abs=0.1)


def sample(number: int, **fields: object) -> dict[str, Any]:
    return {"prompt_id": f"p{number}", "prompt": "What?", "completion": f"answer {number}", "reward": number / 10,
            "num_tokens": 100 - number, "status": "ok", **fields}  # fmt: skip


def read(index: SampleIndex) -> SampleIndex:
    index.read(ALL)
    return index


def test_completions_are_found_by_step_reward_and_text(tmp_path: Path) -> None:
    writer = Samples(tmp_path, 1 << 20)
    for step in range(1, 6):
        writer.write(step, [sample(2 * step), sample(2 * step + 1)])
    writer.close()
    index = read(SampleIndex(tmp_path))
    newest, num = index.page(Filter(), "newest", 0, 3)
    assert (num, [row["prompt_id"] for row in newest]) == (10, ["p10", "p11", "p8"])
    assert index.page(Filter(), "best", 0, 1)[0][0]["prompt_id"] == "p11"
    assert index.page(Filter(), "longest", 0, 1)[0][0]["prompt_id"] == "p2"
    found, num = index.page(Filter(first_step=2, last_step=3, min_reward=0.5), "oldest", 1, 10)
    assert (num, [row["prompt_id"] for row in found]) == (3, ["p6", "p7"])
    found, num = index.page(Filter(text="ANSWER 7"), "newest", 0, 10)
    assert (num, found[0]["step"]) == (1, 3)
    index.close()


def test_completions_stay_readable_over_a_rotation(tmp_path: Path) -> None:
    writer, index = Samples(tmp_path, 2000), SampleIndex(tmp_path)
    for step in range(1, 12):
        writer.write(step, [sample(step)])
        writer.flush()
        index.read(ALL)
        index.read(ALL)
    writer.close()
    assert (tmp_path / "samples.old.jsonl").exists()
    rows, num = index.page(Filter(), "newest", 0, 50)
    assert num == 11
    in_files = [json.loads(line)["step"] for name in ("samples.jsonl", "samples.old.jsonl")
                for line in (tmp_path / name).read_text().splitlines()]  # fmt: skip
    assert sorted(row["step"] for row in rows) == sorted(in_files), "those of files that are gone are left out"
    assert [row["completion"] for row in rows] == [f"answer {row['step']}" for row in rows]
    index.close()


def test_tokens_are_checked() -> None:
    line = {"token_ids": [5, 6, 7], "logprobs": [-0.5, None, float("nan")], "versions": [[3, 2], [4, 99]]}
    assert tokens_of(line) == ([5, 6, 7], [-0.5, None, None], [3, 3, 4])
    assert tokens_of({}) is None
    assert tokens_of({**line, "token_ids": [5, 6, -1]}) is None
    assert tokens_of({**line, "token_ids": [5]}) is None
    assert tokens_of({**line, "versions": ["x"]}) == ([5, 6, 7], [-0.5, None, None], [-1, -1, -1])


def test_only_images_and_videos_are_read(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(20)
    (tmp_path / "a picture").write_bytes(png)
    assert read_media(str(tmp_path / "a picture")) == (png, "image/png")
    assert read_media(f"file://{tmp_path}/a%20picture") == (png, "image/png")
    assert read_media("data:image/png;base64,iVBORw0KGgoAAAAA")[1] == "image/png"
    (tmp_path / "film.mp4").write_text("<script>")
    for uri in (
        str(tmp_path / "film.mp4"),
        "/etc/passwd",
        "/dev/zero",
        str(tmp_path),
        "/none",
        "data:text/html,x",
        "\0",
    ):
        with pytest.raises(MediaError):
            read_media(uri)


def test_folder_of_frames_is_a_video(tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    folder.mkdir()
    with pytest.raises(MediaError, match="has no frames"):
        frames_of(str(folder))
    png = b"\x89PNG\r\n\x1a\n" + bytes(20)
    for name in ("02.png", "01.png", ".DS_Store", "10.png"):
        (folder / name).write_bytes(png)
    frames = frames_of(folder.as_uri())
    assert frames == [folder / "01.png", folder / "02.png", folder / "10.png"]
    assert read_media(str(frames[0])) == (png, "image/png")
    assert frames_of(str(folder / "01.png")) is None
    assert frames_of("data:image/png;base64,AA==") is None
    assert frames_of("\0") is None
    for number in range(MAX_FRAMES + 5):
        (folder / f"{number:05}.png").touch()
    assert len(frames_of(str(folder)) or ()) == MAX_FRAMES


def test_faults_are_events_once_and_limited() -> None:
    log = NoticeLog()
    for _ in range(3):
        log.update("notice", ("one\n\x1b[2J", "two"))
        log.update("problem", ("three",))
    (first, *_), num = log.besides([]), log.num
    assert num == 3
    assert "\x1b" not in first["text"]["text"]
    assert "\n" not in first["text"]["text"]
    written = [{"kind": "notice", "text": {"text": "two"}, "time": 1.0}]
    assert [event["text"]["text"] for event in log.besides(written)] == [first["text"]["text"], "three"]
    for number in range(10_000):
        log.update("notice", (f"peer {number} {'x' * 10_000}",))
    events = log.besides([])
    assert len(events) == MAX_NOTICES
    assert max(len(event["text"]["text"]) for event in events) <= MAX_CHARACTERS
