"""Metrics that are plotted and compared, with their titles and units; docs/reference/metrics.md defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starling.cli.runs.files.lines import number

Read = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True)
class Metric:
    """A number of each step, or of each evaluation."""

    title: str
    read: Read
    """Of the fields of a line; None where the line does not have it."""


@dataclass(frozen=True)
class Plot:
    """Metrics with one unit, which one plot shows together."""

    title: str
    unit: str
    metrics: tuple[Metric, ...]


def named(*names: str) -> Read:
    """Return a reader of the first of these fields that is a number."""

    def read(line: Mapping[str, Any]) -> float | None:
        return next((value for name in names if (value := number(line.get(name))) is not None), None)

    return read


def throughput(step: Mapping[str, Any]) -> float | None:
    """Return the sampled tokens of a step over its whole time, in tokens per second."""
    num_tokens, step_s = number(step.get("num_tokens")), number(step.get("time/step_s"))
    if num_tokens is None or step_s is None or step_s <= 0:
        return number(step.get("tokens_per_s"))
    return num_tokens / step_s


REWARD: Final = Metric("reward", named("sampled_reward_mean", "reward_mean"))
EVALUATION: Final = Metric("evaluation reward", named("reward_mean"))
STALENESS: Final = Metric("staleness, mean", named("staleness_mean"))
STEP_TIME: Final = Metric("step time", named("time/step_s"))
ENTROPY: Final = Metric("entropy", named("entropy"))
THROUGHPUT: Final = Metric("tokens/s", throughput)

STEP_PLOTS: Final = (
    Plot("Reward", "", (REWARD,)),
    Plot(
        "Staleness",
        "versions",
        (STALENESS, Metric("staleness, maximum", named("staleness_max"))),
    ),
    Plot("Step time", "seconds", (STEP_TIME,)),
    Plot(
        "KL divergence",
        "nats",
        (
            Metric("KL to the old policy", named("approx_kl")),
            Metric("KL, rollout against trainer", named("mismatch_kl")),
            Metric("KL to the reference", named("kl_reference")),
        ),
    ),
    Plot("Entropy", "nats", (ENTROPY,)),
    Plot("Throughput", "tokens/s", (THROUGHPUT,)),
    Plot("Loss", "", (Metric("loss", named("loss")),)),
    Plot("Gradient norm", "", (Metric("gradient norm", named("grad_norm")),)),
    Plot("Completion length", "tokens", (Metric("tokens per completion", named("completion_tokens_mean")),)),
)
"""Over steps and seconds; a metric that a run does not have is left out."""
EVALUATION_PLOT: Final = Plot("Evaluation", "", (EVALUATION, Metric("pass at k", named("pass_at_k"))))
"""Of the lines `evaluation`, over the version that was evaluated."""
