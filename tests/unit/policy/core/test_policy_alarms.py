"""Alarms: when they are raised and cleared, and their text."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError
from starling.common.settings import validate
from starling.common.wire.messages import Alarm
from starling.policy.core.alarms import AlarmRule, Alarms
from starling.policy.settings.alarms import AlarmName, AlarmSettings

NAN = float("nan")
CEILING = AlarmRule("high", "x", 1.0, "too high")
FLOOR = AlarmRule("low", "x", 1.0, "too low", is_floor=True)


def steps_on(rule: AlarmRule, values: list[float | None]) -> list[int]:
    """Return the steps, from 1, after which the alarm of `rule` is active if its metric has `values`."""
    alarms = Alarms([rule])
    on = []
    for step, value in enumerate(values, 1):
        if alarms.after(step, {} if value is None else {"x": value}):
            on.append(step)
    return on


@pytest.mark.parametrize(
    ("rule", "values", "on"),
    [
        (CEILING, [1.0, 1.01, 0.9, 0.81, 0.8, 0.9, 1.0], [2, 3, 4]),
        (FLOOR, [1.0, 0.99, 1.1, 1.19, 1.2, 1.0], [2, 3, 4]),
        (CEILING, [NAN, NAN, 0.5], [1, 2]),
        (FLOOR, [NAN, 2.0], [1]),
        (CEILING, [2.0, None, None, 0.5], [1, 2, 3]),
        (AlarmRule("skipped", "x", 0.0, ""), [0.0, 1.0, 0.0], [2]),
        (AlarmRule("still", "x", 0.0, "", is_floor=True, num_steps=2), [0.0, 0.1, 0.0, 0.0, 0.0, 1e-9], [4, 5]),
        (AlarmRule("high", "x", 1.0, "", num_steps=3), [2.0, 2.0, 0.9, 2.0, 2.0, None, 2.0, 0.9], [7, 8]),
    ],
)
def test_alarm_raised_at_bound_and_cleared_by_margin(
    rule: AlarmRule, values: list[float | None], on: list[int]
) -> None:
    """A step without the metric neither counts nor interrupts consecutive steps."""
    assert steps_on(rule, values) == on


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20), is_floor=st.booleans())
def test_alarm_raised_again_only_after_clearing(values: list[float], is_floor: bool) -> None:
    """For any values, an alarm is raised only out of bounds, and cleared only inside by the margin."""
    rule = AlarmRule("a", "x", 1.0, "", is_floor=is_floor)
    alarms, before = Alarms([rule]), False
    for step, value in enumerate(values):
        now = bool(alarms.after(step, {"x": value}))
        if now and not before:
            assert not (value >= 1.0 if is_floor else value <= 1.0)
        if before and not now:
            assert value >= 1.2 if is_floor else value <= 0.8
        before = now


def test_alarm_reports_text_and_since() -> None:
    """Also whether the alarm ends the run."""
    alarms = Alarms([CEILING, FLOOR], fail_on=["high"])
    alarms.after(3, {"x": 5.0})
    (alarm,) = alarms.after(4, {"x": 2.0})
    assert alarm == Alarm(name="high", value=2.0, bound=1.0, text="too high", since=3, fatal=True)
    assert str(alarm) == "high: 2 against a bound of 1 since step 3: too high"


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("not_finite", {"skipped_step": 1.0}, {"skipped_step": 0.0}),
        ("mismatch", {"mismatch_kl": 0.1}, {"mismatch_kl": 0.001}),
        ("weights_still", {"weights_changed_share": 0.0}, {"weights_changed_share": 0.001}),
        ("zero_advantage", {"zero_advantage_share": 1.0}, {"zero_advantage_share": 0.5}),
        ("entropy", {"entropy": 0.0, "zero_advantage_share": 0.5}, {"entropy": 0.5, "zero_advantage_share": 0.5}),
        ("effective_sample", {"ess_token": 0.1}, {"ess_token": 0.9}),
        ("clip", {"clip_fraction": 0.9}, {"clip_fraction": 0.1}),
        ("staleness", {"staleness_max": 9.0}, {"staleness_max": 2.0}),
    ],
)
def test_alarm_default_rules(name: AlarmName, bad: dict[str, float], good: dict[str, float]) -> None:
    """Each is raised within ten bad steps, has a text, and can be disabled."""
    alarms, without = Alarms(AlarmSettings().rules()), Alarms(AlarmSettings(off=(name,)).rules())
    for step in range(10):
        on, off = alarms.after(step, bad), without.after(step, bad)
    assert [alarm.name for alarm in on] == [name]
    assert on[0].text
    assert off == ()
    assert alarms.after(10, good) == ()


def test_alarm_entropy_ignores_supervised_steps() -> None:
    """Supervised steps reduce the entropy on purpose; they have no advantages."""
    alarms = Alarms(AlarmSettings().rules())
    assert all(alarms.after(step, {"entropy": 0.0, "loss": 0.0}) == () for step in range(10))


def test_alarm_names_all_have_rules() -> None:
    """The names allowed in a recipe are those of the rules."""
    assert {rule.name for rule in AlarmSettings().rules()} == set(get_args(AlarmName))


def test_alarm_settings_off_and_fail_on_conflict() -> None:
    """A disabled alarm could never end the run."""
    with pytest.raises(ConfigError, match="fail_on and off both name 'clip'; remove it from one"):
        validate(AlarmSettings, {"off": ["clip"], "fail_on": ["clip"]})
    with pytest.raises(ConfigError, match=r"fail_on\.0 = 'klip'"):
        validate(AlarmSettings, {"fail_on": ["klip"]})
