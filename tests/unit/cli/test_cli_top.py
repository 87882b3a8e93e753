"""The live view of a run: what it draws in terminals of any size, and what its keys do."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from run_folders import evaluation_line, make_attempt, step_line
from textual.pilot import Pilot

from starling.cli.main import main
from starling.cli.run.attempt import Attempt
from starling.cli.runs.feed import Telemetry
from starling.cli.runs.files.metrics import REWARD
from starling.cli.runs.live import MAX_POINTS, GrowingCurve, LiveRun, MetricsTail
from starling.cli.top import control, overview, tables
from starling.cli.top.app import VIEWS, TopApp
from starling.cli.top.plot import Line, plot
from starling.cli.top.tables import Order, replica_table, sample_table
from starling.common.errors import ConfigError
from starling.common.wire.messages import LeaseProgress
from starling.common.wire.telemetry import ReplicaView, RunSnapshot

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202ereversed\r\n"
DEADLINE_S = 60.0


def replica(name: str, role: str = "rollout", version: int = 26, **fields: Any) -> ReplicaView:
    return ReplicaView(name=name, role=role, version=version, num_leases=fields.pop("num_leases", 3), **fields)


def make_snapshot(**fields: Any) -> RunSnapshot:
    given = {
        "phase": "rl",
        "version": 26,
        "last_step": 43,
        "num_supervised_steps": 3,
        "elapsed_s": 39.0,
        "waiting_for": "the groups of step 27: 4 being generated, 3 being scored, 1 scored of 4",
        "groups": {"waiting": 0, "leased": 4, "generated": 3, "scored": 1, "frozen": 0},
        "replicas": (
            replica("policy-0", "policy", gauges={"tokens_per_s": 1085.4}),
            replica("reward-0", "reward", -1, gauges={"queue_depth": 2.0}),
            replica("rollout-0", version=24, num_leases=4, gauges={"tokens_per_s": 169.5, "rows": 5.0}),
        ),
        "step": {"loss": 0.1, "staleness_mean": 0.75, "staleness_max": 1.0, "time/step_s": 0.289},
        "rewards": (0.25, 0.5),
        "curve": (0.125, 0.25, 0.5),
    }
    return RunSnapshot(**{**given, **fields})


@contextmanager
def published(snapshot: RunSnapshot) -> Iterator[Telemetry]:
    """Publish a snapshot again and again, as a controller without CURVE does."""
    context, is_over = zmq.Context(), threading.Event()
    socket = context.socket(zmq.PUB)
    socket.linger = 0
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def publish() -> None:
        while not is_over.wait(0.05):
            socket.send(msgspec.msgpack.encode(snapshot))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield Telemetry(f"tcp://127.0.0.1:{port}", None)
    finally:
        is_over.set()
        thread.join()
        socket.close()
        context.term()


def make_run(folder: Path, completion: str = "a completion") -> Attempt:
    lines = [
        {"time": 1_700_000_000.0, "kind": "joined", "replica": "rollout-0", "role": "rollout", "host": "a", "pid": 1},
        *(step_line(step) for step in range(1, 21)),
        evaluation_line(20, 0.625),
    ]
    sample = {"prompt_id": "p", "prompt": "a prompt", "completion": completion, "reward": 0.5, "status": "ok"}
    return Attempt(make_attempt(folder / "tiny", lines, samples={20: [{**sample, "num_tokens": 7}]}))


def screen_of(pilot: Pilot[int]) -> str:
    """Return what the terminal shows."""
    width, _ = pilot.app.size
    strips = pilot.app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip)[:width] for strip in strips)


async def wait_until(pilot: Pilot[int], holds: Callable[[str], bool], what: object) -> str:
    """Return the screen, as soon as `holds` is true of it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while not holds(shown := screen_of(pilot)):
        assert loop.time() < deadline, f"the screen does not show {what}:\n{shown}"
        await pilot.pause(0.05)
    return shown


async def wait_for(pilot: Pilot[int], *texts: str) -> str:
    """Return the screen, as soon as it shows all `texts`."""
    return await wait_until(pilot, lambda shown: all(text in shown for text in texts), texts)


def drive(
    live: LiveRun, script: Callable[[Pilot[int]], Any], size: tuple[int, int] = (80, 24), *, allow_control: bool = False
) -> TopApp:
    """Run the view in a terminal without a screen, and a script that presses its keys."""
    app = TopApp(live, "tiny", None, allow_control=allow_control)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await script(pilot)

    asyncio.run(run())
    return app


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 12)])
def test_each_view_shows_the_run(tmp_path: Path, size: tuple[int, int]) -> None:
    expected = {
        "overview": ("reward 0.375", "leased 4"),
        "replicas": ("rollout-0",),
        "curves": ("Reward",),
        "evaluations": ("0.625",),
        "waits": ("The run waits for",),
        "events": ("joined",),
        "completions": ("0.5", "ok"),
    }

    async def script(pilot: Pilot[int]) -> None:
        await wait_for(pilot, "step 26 of 43")
        for number, view in enumerate(VIEWS):
            await pilot.press(str(number + 1))
            shown = await wait_for(pilot, *expected[view])
            assert all(len(line) <= size[0] for line in shown.splitlines())

    with published(make_snapshot()) as telemetry:
        drive(LiveRun(make_run(tmp_path), telemetry), script, size)


def test_keys_sort_filter_pause_and_show_details(tmp_path: Path) -> None:
    replicas = tuple(replica(f"rollout-{n}", num_leases=n, gauges={"rows": 1.0}) for n in (3, 1, 2))

    async def listed(pilot: Pilot[int], heading: str, *numbers: int) -> None:
        def holds(shown: str) -> bool:
            names = [line.split()[0] for line in shown.splitlines() if line.strip().startswith("rollout-")]
            return heading in shown and names == [f"rollout-{n}" for n in numbers]

        await wait_until(pilot, holds, (heading, numbers))

    async def script(pilot: Pilot[int]) -> None:
        await wait_for(pilot, "step 26 of 43")
        await pilot.press("2")
        await listed(pilot, "replica", 3, 1, 2)
        await pilot.press("s")
        await listed(pilot, "replica ▲", 1, 2, 3)
        await pilot.press("s", "s", "s", "s", "r")
        await listed(pilot, "leases ▼", 3, 2, 1)
        await pilot.press("slash", *"out-2", "enter")
        await listed(pilot, "/out-2", 2)
        await pilot.press("enter")
        await wait_for(pilot, "rollout-2: rollout", "escape closes")
        await pilot.press("escape", "escape")
        await listed(pilot, "leases ▼", 3, 2, 1)
        await pilot.press("space")
        await wait_for(pilot, "paused")
        await pilot.press("space", "question_mark")
        await wait_for(pilot, "show the next view")
        await pilot.press("escape", "tab")
        await wait_for(pilot, "Reward")
        await pilot.press("q")

    with published(make_snapshot(replicas=replicas)) as telemetry:
        assert drive(LiveRun(make_run(tmp_path), telemetry), script).return_value == 0


@pytest.mark.parametrize("allow_control", [False, True])
def test_requests_of_an_operator_have_to_be_allowed(allow_control: bool) -> None:
    async def script(pilot: Pilot[int]) -> None:
        await wait_for(pilot, "step 26 of 43")
        await pilot.press("x")
        if not allow_control:
            await wait_for(pilot, "start it with --allow-control")
            return
        await wait_for(pilot, "set: KEY VALUE", "rl.max_staleness")
        await pilot.press(*"nonsense", "enter")
        await wait_for(pilot, "write KEY VALUE")
        await pilot.press("e")
        await wait_for(pilot, "Evaluate the newest version")
        await pilot.press("n")
        assert "asking" not in screen_of(pilot)

    with published(make_snapshot()) as telemetry:
        drive(LiveRun(None, telemetry), script, allow_control=allow_control)


def test_drain_and_scale_are_confirmed() -> None:
    async def script(pilot: Pilot[int]) -> None:
        await wait_for(pilot, "step 26 of 43")
        await pilot.press("2")
        await wait_for(pilot, "policy-0", "rollout-0")
        await pilot.press("down", "down", "d")
        await wait_for(pilot, "drain: NAME", "rollout-0")
        await pilot.press("enter")
        await wait_for(pilot, "Drain rollout-0?")
        await pilot.press("n")
        await pilot.press("n")
        await wait_for(pilot, "scale: ROLE NUMBER", "policy 1")
        await pilot.press(*"rollout many", "enter")
        await wait_for(pilot, "is not a number of replicas")
        await pilot.press("n")
        await wait_for(pilot, "scale: ROLE NUMBER")
        await pilot.press(*"rollout 8", "enter")
        await wait_for(pilot, "Scale rollout to 8?")
        await pilot.press("n")
        assert "asking" not in screen_of(pilot)

    with published(make_snapshot()) as telemetry:
        drive(LiveRun(None, telemetry), script, allow_control=True)


def test_hostile_texts_never_reach_the_terminal(tmp_path: Path) -> None:
    hostile = make_snapshot(
        phase=HOSTILE,
        waiting_for=HOSTILE,
        alarms=(HOSTILE, "[/x] no markup"),
        groups={HOSTILE: 1},
        replicas=(replica(HOSTILE, HOSTILE, gauges={HOSTILE: math.nan, "tokens_per_s": math.inf}),),
        step={"loss": HOSTILE, "staleness_mean": math.inf, "staleness_max": math.nan},
    )
    attempt = make_run(tmp_path, HOSTILE)
    with attempt.metrics.open("a") as file:
        file.write(json.dumps({"time": 1e9, "kind": HOSTILE, "replica": HOSTILE, HOSTILE: [HOSTILE]}) + "\n")
        file.write(json.dumps({"time": "x", "kind": "evaluation", "version": 21, "score/" + HOSTILE: 1.0}) + "\n")

    async def script(pilot: Pilot[int]) -> None:
        await wait_for(pilot, "step 26 of 43")
        for number in range(len(VIEWS)):
            await pilot.press(str(number + 1), "enter")
            await pilot.pause(0.2)
            shown = screen_of(pilot)
            assert all(one.isprintable() for one in shown.replace("\n", "")), repr(shown)
            assert "\u202e" not in shown
            await pilot.press("escape")

    with published(hostile) as telemetry:
        drive(LiveRun(attempt, telemetry), script, (160, 40))


def test_run_without_a_controller_shows_its_files(tmp_path: Path) -> None:
    async def script(pilot: Pilot[int]) -> None:
        await wait_for(pilot, "the run has ended: the run is complete", "reward 0.018", "held out (v20)")

    drive(LiveRun(make_run(tmp_path)), script)


def test_no_colour_means_no_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(pilot: Pilot[int]) -> None:
        await wait_for(pilot, "step 26 of 43", "alarm")
        for strip in pilot.app.screen._compositor.render_strips():
            filtered = strip
            for one in pilot.app.get_line_filters():
                filtered = filtered.apply_filter(one, pilot.app.screen.background_colors[1])
            for segment in filtered:
                style = segment.style
                assert style is None or all(c is None or c.is_default for c in (style.color, style.bgcolor))

    with published(make_snapshot(alarms=("clip: too much",))) as telemetry:
        drive(LiveRun(make_run(tmp_path), telemetry), script)


def test_top_needs_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = make_run(tmp_path)
    assert main(["top", str(attempt.folder)]) == 1
    assert capsys.readouterr().err == (
        "starling: top draws on a terminal, and this is none; `starling status RUN` prints the same once\n"
    )


def test_snapshots_are_read_without_a_folder() -> None:
    with published(make_snapshot()) as telemetry:
        live = LiveRun(None, telemetry)
        try:
            assert any(live.poll(1.0) for _ in range(int(DEADLINE_S)))
            assert live.snapshot is not None
            assert live.snapshot.version == 26
            assert live.samples() == []
            assert "reward 0.375" in overview.overview(live, 80, 24).plain
        finally:
            live.close()


def test_tail_reads_what_a_file_gains(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert not tail.read()
    lines = [json.dumps(step_line(step)) + "\n" for step in (1, 2, 2, 3)]
    path.write_text("".join(lines[:2]) + '{"half')
    assert tail.read()
    assert [x for x, _ in tail.curves[REWARD].points()] == [1.0, 2.0]
    path.write_text("".join(lines) + "not json\n")
    assert tail.read()
    assert [x for x, _ in tail.curves[REWARD].points()] == [1.0, 2.0, 3.0], "a step that is made again counts once"
    path.write_text(lines[0])
    assert tail.read()
    assert [x for x, _ in tail.curves[REWARD].points()] == [1.0], "a file that is shorter is read anew"


def test_curve_of_any_length_is_bounded() -> None:
    curve = GrowingCurve()
    for x in range(20_000):
        curve.add(float(x), x / 20_000)
    points = curve.points()
    assert MAX_POINTS // 2 <= len(points) <= MAX_POINTS
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert all(math.isclose(y, x / 20_000, abs_tol=1e-9) for x, y in points)
    assert curve.newest == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "points", [[], [(1.0, 0.0)], [(1.0, 5.0), (2.0, 5.0)], [(1.0, math.nan)], [(0.0, -1e300), (1e9, 1e300)]]
)
@pytest.mark.parametrize("size", [(80, 10), (19, 4)])
def test_plot_has_its_size(points: list[tuple[float, float]], size: tuple[int, int]) -> None:
    rows = plot("title", [Line("", points)], *size)
    assert len(rows) == size[1]
    assert all(len(row) == size[0] for row in rows)


def test_plot_rises_with_its_values() -> None:
    rows = [row.plain for row in plot("reward", [Line("", [(0.0, 0.0), (10.0, 1.0)])], 40, 8)]
    assert rows[0].split() == ["reward", "1"]
    assert rows[1].strip().startswith("1┤")
    assert rows[-2].strip().startswith("0┤")
    marks = [max((i for i, one in enumerate(row) if "\u2800" < one <= "\u28ff"), default=-1) for row in rows[1:-1]]
    assert marks == sorted(marks, reverse=True)
    assert rows[-1].split() == ["step", "0", "10"]


def test_rows_without_a_value_come_last() -> None:
    table = replica_table(make_snapshot())
    behind = table.columns.index("behind")
    for descending, first in ((False, "policy-0"), (True, "rollout-0")):
        rows = table.chosen(Order(behind, descending), "")
        assert [rows[0].key, rows[-1].key] == [first, "reward-0"]
    assert [row.key for row in table.chosen(Order(), "QUEUE")] == ["reward-0"]


def test_pulls_are_shown_with_their_progress() -> None:
    progress = LeaseProgress(bytes_done=3, bytes_total=8)
    row = replica_table(make_snapshot(replicas=(replica("rollout-0", pulling=27, progress=progress),))).rows[0]
    assert tables.cell_text(row.cells[6]) == "27: 37 %"


def test_damaged_samples_are_rows() -> None:
    rows = sample_table([{}, {"step": "x", "prompt": ["a"], "completion": None, "reward": True}]).rows
    assert [len(row.cells) for row in rows] == [6, 6]


def test_changes_are_parsed_as_by_starling_set() -> None:
    assert control.change("rl.max-staleness 2").question == "Set rl.max_staleness = 2 from the next step on?"
    assert control.change("policy.optimizer.learning_rate=1e-6").question.startswith(
        "Set policy.optimizer.learning_rate"
    )
    for wrong in ("", "key", "key [1]"):
        with pytest.raises(ConfigError):
            control.change(wrong)
