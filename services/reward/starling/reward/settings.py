"""Settings of the reward service.

[reward]
num_workers = 2

[[reward.scorers]]
name = "gsm8k"

[[reward.scorers]]
name = "format"
weight = 0.2
timeout_s = 1.0
options = { pattern = "<answer>.*</answer>" }
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from starling.common.errors import ConfigError
from starling.common.ranges import MAX_COEFFICIENT, MAX_MIB, MAX_PROCESSES, MAX_SLOTS
from starling.common.sandbox.settings import GPU, SandboxLevel, SandboxNeeds
from starling.common.settings import Seconds, SettingsSection
from starling.reward.core.rewards import RewardBounds, WeightedScorer
from starling.reward.http.settings import HttpSettings
from starling.reward.score.decode.settings import DecoderSettings
from starling.reward.score.scorers.batch import MAX_BATCH
from starling.reward.score.scorers.registry import check_name
from starling.reward.score.workers.devices import check_device

MAX_RETRIES: Final = 100
MIN_MEMORY_MB: Final = 128
"""A worker needs a part of it itself."""


CODE: Final = "code"
JUDGE: Final = "judge"
SERVICE: Final = "service"
_SECRETS: Final = {JUDGE: "api_key_variable", SERVICE: "token_variable"}
"""By the name of a scorer that asks over the network, the option that names the variable with its secret."""
_SERVICE_URLS: Final = ("REMOTE_REWARD_ENQUEUE_URL", "WFM_REWARD_ENQUEUE_URL")
"""Variables with the URL of a service, one of which a scorer without the option `url` needs."""


class ScorerSettings(SettingsSection):
    """One scorer and its share of the reward."""

    name: str
    """A built-in scorer (exact_match, prefix_match, regex, choice, gsm8k, math, code, format, json_schema, length,
    overlong, repetition, environment, reward_model, judge, service, verifiers_rubric; of pixels brightness,
    target_colour, colourfulness, motion, smoothness, flicker, first_frame_consistency, sharpness,
    jpeg_compressibility, ocr; of latents latent_target; published models: pickscore, hpsv2, hpsv3, image_reward,
    cosmos_reason1, dance_grpo, gen_eval, unified_reward), `reasoning_gym:<task>`, an installed plug-in, or your own
    function or class as `module:function` or `path/to/file.py:Class`."""
    weight: float = Field(default=1.0, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """The reward is the sum of the scores times their weights. With 0 the score is only observed."""
    use: Literal["training", "evaluation"] = "training"
    """`evaluation`: its scores are never part of a reward, and show whether the model gets better where it is not
    trained. They are reported apart from the others, a failure costs no sample, and it has neither weight nor bounds.
    It has no worker with a scorer of the other use.
    """
    key: str = ""
    """Which of its scores counts, for a class with several `keys`: one of them, or a sum such as `quality+motion`."""
    clip_min: float | None = Field(default=None, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """A lower score counts as this one."""
    clip_max: float | None = Field(default=None, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """A higher score counts as this one."""
    timeout_s: Seconds | None = None
    """Time limit of one completion, or of one batch, in seconds; without it, the service's `timeout_s`."""
    batch_size: int | None = Field(default=None, ge=1, le=MAX_BATCH)
    """Most completions of a batch of a class; without it, the class's own."""
    retries: int = Field(default=1, ge=0, le=MAX_RETRIES)
    """How often a completion whose worker ended, or exceeded the time limit, is scored again, alone."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the scorer."""
    label: str = ""
    """Its name in metrics; without it, `name`."""
    tasks: tuple[str, ...] = ()
    """Score only prompts whose metadata has one of these as their `task`; empty for all prompts."""
    needs: SandboxNeeds = SandboxNeeds()
    """What it may reach: a judge needs the network, a reward model its folder and a device."""
    python: Path | None = None
    """Interpreter of its own Python environment, as `/opt/judge/.venv/bin/python`, which needs Python 3.11 and msgspec
    0.21 or later; without it, the service's own environment."""
    device: str = ""
    """`cuda:1`: the only GPU that it sees, as `cuda:0`; it needs no `devices` then. `cpu`: it sees no GPU. Without it:
    those of its `needs`."""
    memory_mb: int | None = Field(default=None, ge=MIN_MEMORY_MB, le=MAX_MIB)
    """Limit on the memory of each of its workers, with all that these start, in MiB."""
    num_workers: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Worker processes for it alone; without it, it shares the service's `num_workers` with the scorers of equal
    `use`, `needs`, `python`, `device` and `memory_mb`."""

    @model_validator(mode="after")
    def _code_needs_nothing(self) -> Self:
        if self.name == CODE and not (self.needs.grants_nothing and self.device in ("", "cpu")):
            raise ConfigError(
                "Scorer 'code' runs programs that a model wrote, which would get what it declares: leave only "
                "`max_tasks` in its `needs`, and no `device`."
            )
        return self

    @model_validator(mode="after")
    def _network_is_declared(self) -> Self:
        if self.name not in _SECRETS:
            return self
        variable = self.options.get(_SECRETS[self.name], "")
        wanted = [str(variable)] if variable else []
        if self.name == SERVICE and not self.options.get("url") and not set(_SERVICE_URLS) & set(self.needs.variables):
            wanted.append(_SERVICE_URLS[0])
        if not self.needs.network or not set(wanted) <= set(self.needs.variables):
            named = ", ".join(f'"{one}"' for one in wanted)
            needs = f"{{ network = true{f', variables = [{named}]' if wanted else ''} }}"
            asked = "a model" if self.name == JUDGE else "another service"
            raise ConfigError(f"Scorer {self.name!r} asks {asked} over the network: declare `needs = {needs}`.")
        return self

    @model_validator(mode="after")
    def _evaluation_is_apart(self) -> Self:
        if self.use == "evaluation":
            for name, value, unset in (
                ("weight", self.weight, 1.0), ("clip_min", self.clip_min, None), ("clip_max", self.clip_max, None)
            ):  # fmt: skip
                if value != unset:
                    raise ConfigError(
                        f"Scorer {self.title!r} has use = 'evaluation', so its scores are no part of the reward, and "
                        f"{name} = {value:g} would do nothing: remove it, or set use = 'training'."
                    )
        return self

    @property
    def title(self) -> str:
        """The name in metrics: `label`, or else `name`."""
        return self.label or self.name

    @property
    def own_needs(self) -> SandboxNeeds:
        """What it may reach, its `device` included."""
        if not self.device.startswith("cuda") or GPU in self.needs.devices:
            return self.needs
        return self.needs.model_copy(update={"devices": (*self.needs.devices, GPU)})

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.python is None:  # another environment has other plug-ins, which its worker knows
            check_name(self.name)
        return self

    @field_validator("device")
    @classmethod
    def _device_form(cls, device: str) -> str:
        return device and check_device("device", device)

    @field_validator("python")
    @classmethod
    def _absolute(cls, python: Path | None) -> Path | None:
        # Not resolved: the link in a virtual environment says which environment it is.
        return None if python is None else python.expanduser().absolute()


class RewardSettings(SettingsSection):
    """How trajectories are scored."""

    scorers: tuple[ScorerSettings, ...] = Field(default=(), validate_default=True)
    """The scorers whose weighted sum is the reward, at least one with a weight other than 0; and those that only
    evaluate."""
    num_workers: int = Field(default=2, ge=1, le=MAX_PROCESSES)
    """Worker processes for the scorers of equal `use`, `needs`, `python`, `device` and `memory_mb`; each scores one
    completion or batch at a time."""
    timeout_s: Seconds = 10.0
    """Time limit of one scorer for one completion or batch; then its worker is killed and replaced."""
    start_timeout_s: Seconds = 120.0
    """Time limit of a worker's start and the import of its scorers, in seconds."""
    clip_min: float | None = Field(default=None, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """A lower weighted sum counts as this one."""
    clip_max: float | None = Field(default=None, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """A higher weighted sum counts as this one."""
    scale: float = Field(default=1.0, gt=0.0, le=MAX_COEFFICIENT)
    """Factor of the reward, after `clip_min` and `clip_max`."""
    decoder: DecoderSettings = DecoderSettings()
    """Decoding of latents, for scorers that read pixels."""
    http: HttpSettings = HttpSettings()
    """Rewards over HTTP."""
    max_media_mb: int = Field(default=4096, ge=1, le=MAX_MIB)
    """Limit on the latents of a run's groups that are scored at a time, with the pixels that they are decoded to and
    what HTTP clients send, in MiB; further groups wait."""
    quarantine_mb: int = Field(default=64, ge=0, le=MAX_MIB)
    """Limit on the files in `<run folder>/quarantine`, in MiB: the completions that ended their scorer's worker, or
    exceeded its time limit, at every try; `starling reward replay FILE` scores one again."""
    num_slots: int = Field(default=8, ge=1, le=MAX_SLOTS)
    """Groups that are scored at a time; the controller sends no more."""
    sandbox: SandboxLevel = "auto"
    """Sandbox of the workers. `auto`: the strongest that this machine offers. `required`: one with namespaces, or the
    start fails. `bubblewrap`, `namespaces`, `landlock`, `process`: just this one; see `docs/how-to/sandboxes.md`."""

    def trained_scorers(self) -> tuple[ScorerSettings, ...]:
        """Return the scorers that count in the reward."""
        return tuple(scorer for scorer in self.scorers if scorer.weight and scorer.use == "training")

    def evaluation_scorers(self) -> tuple[ScorerSettings, ...]:
        """Return the scorers that only evaluate."""
        return tuple(scorer for scorer in self.scorers if scorer.use == "evaluation")

    def weighted_scorers(self) -> tuple[WeightedScorer, ...]:
        """Return the scorers in the form of the core."""
        return tuple(
            WeightedScorer(one.title, 0.0, one.tasks, evaluates=True)
            if one.use == "evaluation"
            else WeightedScorer(one.title, one.weight, one.tasks, *_range(one.clip_min, one.clip_max))
            for one in self.scorers
        )

    @property
    def bounds(self) -> RewardBounds:
        """How the weighted sum becomes the reward."""
        return RewardBounds(*_range(self.clip_min, self.clip_max), self.scale)

    @model_validator(mode="after")
    def _limits_ordered(self) -> Self:
        ranges = {f"Scorer {one.title!r}": _range(one.clip_min, one.clip_max) for one in self.scorers}
        for what, (low, high) in {"reward": _range(self.clip_min, self.clip_max), **ranges}.items():
            if low > high:
                raise ConfigError(f"{what}: clip_min {low:g} is above clip_max {high:g}; swap them.")
        return self

    @field_validator("scorers")
    @classmethod
    def _some(cls, scorers: tuple[ScorerSettings, ...]) -> tuple[ScorerSettings, ...]:
        if not scorers:
            raise ConfigError(
                'No scorer is set, so there would be no reward: add `scorers = [{ name = "exact_match" }]`.'
            )
        if not any(scorer.weight and scorer.use == "training" for scorer in scorers):
            raise ConfigError(
                "Every scorer has weight 0 or use = 'evaluation', so every reward would be 0: give one a weight."
            )
        twice = [title for title, count in Counter(scorer.title for scorer in scorers).items() if count > 1]
        if twice:
            raise ConfigError(f"Two scorers are called {twice[0]!r} in metrics: give one of them another `label`.")
        titles = {scorer.title for scorer in scorers}
        for title in titles:  # with several scores, `judge` has the metrics `judge/<key>`
            if any(title.startswith(f"{other}/") for other in titles):
                raise ConfigError(f"Scorer {title!r} could be a score of another in metrics: give it another `label`.")
        return scorers


def _range(clip_min: float | None, clip_max: float | None) -> tuple[float, float]:
    return -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
