"""Texts of the first view and of the lines above all views, for a terminal of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from starling.cli.run.screen import Pace, duration, evaluation_text, recent_mean
from starling.cli.runs.files.events import event_text
from starling.cli.runs.files.lines import number, text_of, time_of
from starling.cli.runs.files.metrics import EVALUATION, REWARD, STALENESS, STEP_PLOTS, STEP_TIME, THROUGHPUT
from starling.cli.runs.live import SILENT_S, LiveRun
from starling.cli.runs.pages.page import figure_text, moment
from starling.cli.top.plot import MIN_HEIGHT, MIN_WIDTH, Line, beside, plot
from starling.cli.top.tables import pull_text
from starling.common.counts import counted
from starling.common.observe.terminal import one_line
from starling.common.wire.telemetry import ReplicaView, RunSnapshot

WIDE: Final = 110
"""Columns from which on two plots stand beside each other."""
MAX_ALARMS: Final = 3
COLOURS: Final = ("cyan", "yellow", "green", "magenta")
ROLES: Final = ("policy", "rollout", "reward", "teacher")
BAR: Final = 20


def header(name: str, snapshot: RunSnapshot | None, pace: Pace, width: int) -> Text:
    """Return the line at the top: the run, its phase, its progress and its time."""
    left = Text(f" {one_line(name)}", style="bold")
    if snapshot is None:
        left.truncate(width, pad=True)
        return left
    what, done, goal = "step", snapshot.version, snapshot.last_step
    if snapshot.num_prompts:
        what, done, goal = "prompt", snapshot.num_answered, snapshot.num_prompts
    left.append(f" · {one_line(snapshot.phase)}", style="not bold")
    left_s = pace.left_s(snapshot)
    rest = f", about {duration(left_s)} left" if left_s is not None else ""
    share = min(1.0, done / goal) if goal > 0 else 0.0
    room = width - len(left) - len(f"  {what} {done:,} of {goal:,}  {duration(snapshot.elapsed_s)}{rest} ")
    bar = _bar(share, min(BAR, room - 1)) if room > 6 else ""
    right = f"{what} {done:,} of {goal:,} {bar} {duration(snapshot.elapsed_s)}{rest} "
    left.truncate(max(0, width - len(right) - 1), overflow="ellipsis", pad=True)
    left.append(f" {right}", style="not bold")
    left.truncate(width, overflow="ellipsis")
    return left


def status(live: LiveRun, width: int) -> Text:
    """Return the lines below: what the run waits for, whether its controller is silent, and its alarms."""
    snapshot, lines = live.snapshot, list[Text]()
    silence = _silence(live)
    if silence:
        lines.append(Text(silence, style="bold yellow"))
    elif snapshot is not None:
        lines.append(Text.assemble((" now  ", "bold cyan"), one_line(snapshot.waiting_for or "nothing is waited for")))
    if live.problem:
        lines.append(Text(one_line(live.problem), style="yellow"))
    if snapshot is not None and not silence:
        alarms = snapshot.alarms
        lines += [Text.assemble((" alarm ", "reverse red"), " ", one_line(alarm)) for alarm in alarms[:MAX_ALARMS]]
        if len(alarms) > MAX_ALARMS:
            lines.append(Text(f"        and {counted(len(alarms) - MAX_ALARMS, 'more alarm')}", style="red"))
        notices = snapshot.notices
        lines += [Text.assemble((" fault ", "reverse yellow"), " ", one_line(one)) for one in notices[-MAX_ALARMS:]]
        if snapshot.dropped:
            lines.append(Text(f"{counted(snapshot.dropped, 'message')} of replicas refused", style="yellow"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _silence(live: LiveRun) -> str:
    """Return what is known of a run whose controller publishes nothing; empty for one that publishes."""
    silent_s, state = live.silent_s(), live.state
    if silent_s < SILENT_S:
        return "" if live.snapshot is not None else "connecting to the controller ..."
    if live.snapshot is not None and live.snapshot.phase == "over":
        return "the run is over"
    if state is not None and state.name != "running":
        reason = f": {one_line(state.reason)}" if state.reason else ""
        when = moment(live.newest_time())
        return f"the run {'has ' if state.name != 'stopped' else 'was '}{state.name}{reason}" + (
            f"; last line {when}" if when else ""
        )
    what = "what follows is from before" if live.snapshot is not None else "it is starting, or cannot be reached"
    return f"no word from the controller for {silent_s:.0f} s; {what}"


def overview(live: LiveRun, width: int, height: int) -> Text:
    """Return the first view: figures, groups, replicas, curves and the newest events."""
    snapshot = live.snapshot
    lines = _figures(live, width)
    if snapshot is not None:
        lines.append(_groups(snapshot))
        lines.append(Text())
        lines += _replicas(snapshot, width, height)
    lines.append(Text())
    num_events = 3 if height - len(lines) >= MIN_HEIGHT + 7 else 0
    plot_height = height - len(lines) - (num_events + 1 if num_events else 0)
    if plot_height >= MIN_HEIGHT and width >= MIN_WIDTH:
        lines += _plots(live, width, min(plot_height, 24))
    if num_events:
        lines += [Text(), *_events(live, num_events)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines[:height])


def curves(live: LiveRun, width: int, needle: str) -> Text:
    """Return the plots of all metrics that the run has, in as many columns as there is room for."""
    columns = max(1, min(3, width // 48))
    each = (width - 2 * (columns - 1)) // columns
    drawn = []
    for one in STEP_PLOTS:
        chosen = [(metric, live.curve(metric)) for metric in one.metrics]
        shown = [
            Line(metric.title, points, COLOURS[number % len(COLOURS)])
            for number, (metric, points) in enumerate(chosen)
            if points and needle.casefold() in f"{one.title} {metric.title}".casefold()
        ]
        if shown:
            drawn.append(plot(one.title, shown, each, 9, one.unit))
    if not drawn:
        return Text("No step yet." if not needle else f"No curve has {needle!r} in its name.", style="dim")
    rows = []
    for begin in range(0, len(drawn), columns):
        rows += [*beside(drawn[begin : begin + columns]), Text()]
    return Text("\n").join(rows)


def _figures(live: LiveRun, width: int) -> list[Text]:
    """Return the figures of the newest step, wrapped to the width."""
    snapshot = live.snapshot
    step = dict(snapshot.step) if snapshot is not None and snapshot.step else live.newest_step()
    figures: list[tuple[str, str]] = []
    rewards = snapshot.rewards if snapshot is not None else tuple(y for _, y in live.curve(REWARD)[-5:])
    if rewards:
        figures.append(("reward", f"{recent_mean(rewards):.3f}"))
    elif (loss := number(step.get("loss"))) is not None:
        figures.append(("loss", figure_text(loss)))
    mean, most = number(step.get("staleness_mean")), number(step.get("staleness_max"))
    if mean is not None and most is not None:
        figures.append(("staleness", f"mean {mean:.2f}, most {most:.0f}"))
    speed = _speed(snapshot) or THROUGHPUT.read(step)
    if speed:
        figures.append(("tokens/s", f"{speed:,.0f}"))
    for title, metric in (("step time", STEP_TIME),):
        value = metric.read(step)
        if value is not None:
            figures.append((title, f"{value:.3g} s"))
    evaluations = live.evaluations()
    if evaluations and (reward := EVALUATION.read(evaluations[-1])) is not None:
        figures.append((f"held out (v{text_of(evaluations[-1], 'version', 12).removesuffix('.0')})", f"{reward:.3f}"))
    for title, name in (("KL", "mismatch_kl"), ("entropy", "entropy"), ("grad norm", "grad_norm")):
        if (value := number(step.get(name))) is not None:
            figures.append((title, figure_text(value, 3)))
    return _wrapped(figures, width)


def _wrapped(figures: Sequence[tuple[str, str]], width: int) -> list[Text]:
    lines = [Text()]
    for title, value in figures:
        item = Text.assemble((title, "dim"), " ", (value, "bold"))
        if len(lines[-1]) and len(lines[-1]) + 3 + len(item) > width:
            lines.append(Text())
        lines[-1] = Text("   ").join([lines[-1], item]) if len(lines[-1]) else item
    return lines


def _speed(snapshot: RunSnapshot | None) -> float:
    replicas = snapshot.replicas if snapshot is not None else ()
    return sum(number(one.gauges.get("tokens_per_s")) or 0.0 for one in replicas if one.role == "rollout")


def _groups(snapshot: RunSnapshot) -> Text:
    line = Text("groups", style="dim")
    for name, num in snapshot.groups.items():
        line.append("   ")
        line.append(one_line(name), style="dim" if not num else "not dim")
        line.append(f" {num}", style="bold not dim" if num else "dim")
    return line


def _replicas(snapshot: RunSnapshot, width: int, height: int) -> list[Text]:
    """Return one line for each replica where there is room, else one for each role."""
    replicas = snapshot.replicas
    if not replicas:
        return [Text("no replica has joined", style="yellow")]
    if len(replicas) <= max(5, height // 4):
        size = max(len(one_line(one.name)) for one in replicas)
        return [_replica(snapshot, one, min(size, 24)) for one in replicas]
    by_role = {role: [one for one in replicas if one.role == role] for role in dict.fromkeys(r.role for r in replicas)}
    order = sorted(by_role, key=lambda role: (ROLES.index(role) if role in ROLES else len(ROLES), role))
    return [_role(snapshot, role, by_role[role]) for role in order]


def _replica(snapshot: RunSnapshot, replica: ReplicaView, size: int) -> Text:
    line = Text(f"{one_line(replica.name)[:size]:<{size}}", style="bold")
    if replica.role in ("policy", "rollout"):
        behind = snapshot.version - replica.version if replica.version >= 0 else 0
        line.append(f"  v{replica.version}" if replica.version >= 0 else "  no version", style="not bold")
        line.append(
            f" ({behind} behind)" if behind > 0 else "", style="not bold yellow" if behind > 1 else "not bold dim"
        )
    line.append(f"  {counted(replica.num_leases, 'lease')}", style="not bold")
    speed = number(replica.gauges.get("tokens_per_s"))
    if speed:
        line.append(f"  {speed:,.0f} tokens/s", style="not bold")
    if pulls := pull_text(replica):
        line.append(f"  pulls {one_line(pulls)}", style="not bold cyan")
    return line


def _role(snapshot: RunSnapshot, role: str, replicas: Sequence[ReplicaView]) -> Text:
    line = Text(f"{one_line(role):<8}", style="bold")
    line.append(f" × {len(replicas)}", style="not bold")
    versions = [one.version for one in replicas if one.version >= 0 and role in ("policy", "rollout")]
    if versions:
        low, high = min(versions), max(versions)
        line.append(f"  v{low}" if low == high else f"  v{low} to v{high}", style="not bold")
    line.append(f"  {counted(sum(one.num_leases for one in replicas), 'lease')}", style="not bold")
    speed = sum(number(one.gauges.get("tokens_per_s")) or 0.0 for one in replicas)
    line.append(f"  {speed:,.0f} tokens/s" if speed else "", style="not bold")
    num_pulls = sum(one.progress is not None for one in replicas)
    line.append(f"  {counted(num_pulls, 'pull')} in progress" if num_pulls else "", style="not bold cyan")
    return line


def _plots(live: LiveRun, width: int, height: int) -> list[Text]:
    num = 2 if width >= WIDE else 1
    each = (width - 2 * (num - 1)) // num
    rewards = live.curve(REWARD)
    if not rewards and live.snapshot is not None:
        rewards = [(float(index), value) for index, value in enumerate(live.snapshot.curve)]
    evaluations = live.curve(EVALUATION)
    lines = (
        [Line("", rewards, "green")]
        if not evaluations
        else [
            Line("trained", rewards, "green"),
            Line("held out", evaluations, "magenta"),
        ]
    )
    drawn = [plot("reward", lines, each, height)]
    if num == 2:
        speed = live.curve(THROUGHPUT)
        title, points, unit = ("throughput", speed, "tokens/s") if speed else ("staleness", live.curve(STALENESS), "")
        drawn.append(plot(title, [Line("", points, "cyan")], each, height, unit))
    return beside(drawn)


def _events(live: LiveRun, num: int) -> list[Text]:
    lines = []
    for event in live.events()[-num:]:
        line = Text(moment(time_of(event.get("time")))[11:] or "        ", style="dim")
        line.append(f"  {one_line(text_of(event, 'kind', 40))}", style="bold not dim")
        line.append(f"  {one_line(_short_event(event))}", style="not dim")
        lines.append(line)
    return lines


def _short_event(event: dict[str, object]) -> str:
    if event.get("kind") == "evaluation" and number(event.get("version")) is not None:
        numbers: dict[str, float | str | None] = {
            name: value for name, value in event.items() if isinstance(value, int | float | str)
        }
        return f"version {text_of(event, 'version', 20)}: {evaluation_text(numbers)}"
    return event_text(event)


def _bar(share: float, width: int) -> str:
    full = round(share * width)
    return "━" * full + "─" * (width - full)
