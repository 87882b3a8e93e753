"""The rollout's settings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from starling.common.settings import ModelSettings, ServiceSettings, SettingsSection, WeightsSettings


class VllmSettings(SettingsSection):
    """The engine `vllm`: what is passed on to it."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Workers that share each layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages that the layers are cut into."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights and cache, where `kv_cache_mb` does not say it."""
    kv_cache_mb: int = Field(default=0, ge=0)
    """MiB of each worker's cache of keys and values; 0 for what `gpu_memory_utilization` leaves."""
    kv_cache_dtype: str = "auto"
    """Element type of that cache; `fp8` halves it where the device can."""
    enforce_eager: bool = False
    """Run without compiling, and without CUDA graphs."""
    prefix_caching: bool = True
    """Share the keys and values of common prefixes between requests, those of a group above all."""
    speculative: dict[str, Any] = Field(default_factory=dict)
    """vLLM's `speculative_config`, for example `{method = "ngram", num_speculative_tokens = 4}`."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, by name."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """How long it may take to start."""


class EnvironmentSettings(SettingsSection):
    """What stands between a completion and its trajectory."""

    kind: str = ""
    """Empty: a completion is the whole trajectory. `tools`: the model calls functions. `gym`: an environment in the
    form of Gymnasium that speaks text. `verifiers`: an environment of that library. `agent`: a program of yours that
    talks to the model as an OpenAI client. Else your own `async def`, as `module:name` or `path/to/file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What the environment takes by name; see `docs/how-to/environments.md`."""
    max_turns: int = Field(default=8, ge=1)
    """Most replies of the model in one trajectory."""
    turn_max_tokens: int = Field(default=0, ge=0)
    """Most tokens of one reply; 0 for what `sampling.max_tokens` leaves: that bounds the sampled tokens of all."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long one trajectory may take; then it is an `env_error`. Time does not count while there is no engine that
    could generate: asleep, made again, or without weights."""


class ApiSettings(SettingsSection):
    """The OpenAI-compatible endpoint of each replica."""

    enabled: bool = False
    """Listen; each replica on a port of its own."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of rollout-0, the next one of rollout-1 and so on; 0 takes free ones, which the replicas log and write to
    `<run folder>/api/<replica>.json`."""
    key: str = ""
    """The API key that clients give; empty for one that is made for the run and written beside the port."""
    max_requests: int = Field(default=256, ge=1)
    """Requests that are worked on at a time; those beyond are refused with 429. Those of episodes do not count."""
    tool_parser: Literal["", "hermes", "llama"] = ""
    """How the model writes calls of tools, where a request offers it some; empty to go by its chat template."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long one request may take; then it is refused with 504, and what was generated is dropped. Those of an
    episode may take as long as that: `rollout.environment.timeout_s`."""
    read_timeout_s: float = Field(default=60.0, gt=0)
    """How long a request's body may take to arrive; then it is refused with 408, and its connection closed."""


class RolloutSettings(SettingsSection):
    """How one replica generates and adopts."""

    engine: str = "transformers"
    """What generates: `transformers`, `vllm`, or a class of yours as `module:Class` or `path/to/file.py:Class`."""
    max_engine_restarts: int = Field(default=3, ge=0)
    """How often an engine that was lost is made again within `engine_restart_window_s`, before the replica gives up."""
    engine_restart_window_s: float = Field(default=600.0, gt=0)
    """An engine that died longer ago counts no more."""
    engine_silence_s: float = Field(default=300.0, gt=0)
    """An engine in processes of its own (`vllm`) that has requests, and samples no token for so long, hangs: it counts
    as lost. Not while it starts or is paused; but it must cover what is compiled later, and the longest prompts."""
    num_slots: int = Field(default=16, ge=1)
    """Groups that the controller may give this replica at a time."""
    max_rows: int = Field(default=128, ge=1)
    """Most sequences that are generated together."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of a prompt with its completion; without it, what the model can be trained on: its context or, where
    layers attend to a window only, that."""
    max_media_bytes: int = Field(default=256 << 20, ge=1, le=900_000_000)
    """Most bytes of a prompt's images and videos as the model takes them, some 25 MB for a megapixel, and of the same
    decoded, 3 MB for a megapixel of each as it is. They travel and are journaled with the completions; more than this
    bound the journal cannot take."""
    media_timeout_s: float = Field(default=60.0, gt=0)
    """How long a prompt's images and videos may take, once they are being read, before another rollout is asked."""
    exclusive: bool = False
    """Generate each group in a batch of its own: slower, but batching cannot change a bit."""
    pull_timeout_s: float = Field(default=60.0, gt=0)
    """How long the pull of one version may take before it fails and the old version stays."""
    version_timeout_s: float = Field(default=600.0, gt=0)
    """How long a group may wait here for weights that may sample it, before it goes back to the controller."""
    adoption: Literal["keep", "recompute", "salt", "finish"] = "keep"
    """What running requests do when new weights are there. `keep`: go on, with the keys and values that they have.
    `recompute`: have those computed anew by the new weights. `salt`: go on with theirs, which no later request shares.
    `finish`: end first; the weights wait."""
    finish_timeout_s: float = Field(default=300.0, gt=0)
    """How long new weights wait for running requests under `finish`, before these are recomputed instead."""
    double_buffer: bool = True
    """Pull into a staging area of the weights' size while generation goes on, so that the pause is only the switch.
    Without it the engine pauses for the whole pull, and needs one bucket more instead."""
    load_weights: bool = False
    """Read the weights in `model.path` at the start, as version 0, instead of waiting for a policy's."""
    transport: Literal["ucx", "tcp", "local", "nccl", "gloo", "nixl"] = "ucx"
    """How weights travel from this replica to others that adopt from it; as `policy.transport`."""
    vllm: VllmSettings = VllmSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    api: ApiSettings = ApiSettings()


class RolloutProcess(ServiceSettings):
    """All settings of a rollout process."""

    model: ModelSettings = ModelSettings()
    weights: WeightsSettings = WeightsSettings()
    rollout: RolloutSettings = RolloutSettings()


class TeacherSettings(SettingsSection):
    """How a teacher scores the tokens of others."""

    path: str = ""
    """A Hugging Face model folder, with weights. Its tokenizer must be that of the model that is trained."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type of its weights; log-probabilities are taken in float32."""
    device: str = "auto"
    """Where to compute: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one."""
    top_k: int = Field(default=0, ge=0)
    """How many of its likeliest tokens it tells at each place; 0 for none, only the log-probability of each sampled
    token."""
    num_slots: int = Field(default=4, ge=1)
    """Groups that the controller may give this teacher at a time; it works on one, and has the others ready."""
    tokens_per_forward: int = Field(default=8192, ge=1)
    """Most tokens, padding included, of one forward pass; a completion that is longer by itself has its own."""


class TeacherProcess(ServiceSettings):
    """All settings of a teacher process."""

    model: ModelSettings = ModelSettings()
    teacher: TeacherSettings = TeacherSettings()
