"""The rollout's settings."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from starling.algo.diffusion.settings import SamplerSettings
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.ranges import MAX_COUNT, MAX_MIB, MAX_PROCESSES, MAX_ROWS, MAX_SLOTS, MAX_TOKENS, MAX_WHOLE
from starling.common.sandbox.settings import SandboxLevel, SandboxNeeds
from starling.common.secret_settings import Secret
from starling.common.settings import ModelSettings, Seconds, ServiceSettings, SettingsSection, WeightsSettings
from starling.weightsync.offers.offer import TransportChoice

ENGINES_OF_TEXT: Final = ("transformers", "vllm")
"""Built-in engines of language models."""


class VllmSettings(SettingsSection):
    """Arguments of the engine `vllm`."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Workers that share each layer (tensor parallelism)."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Stages that the layers are split into (pipeline parallelism)."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights and KV cache, unless `kv_cache_mb` is set."""
    kv_cache_mb: int = Field(default=0, ge=0, le=MAX_MIB)
    """Size of each worker's KV cache in MiB; 0 for what `gpu_memory_utilization` leaves."""
    kv_cache_dtype: str = "auto"
    """Element type of the KV cache; `fp8` halves its size on devices that support it."""
    enforce_eager: bool = False
    """Run without compilation and CUDA graphs."""
    prefix_caching: bool = True
    """Share the KV cache of common prefixes between requests, above all within a group."""
    speculative: dict[str, Any] = Field(default_factory=dict)
    """vLLM's `speculative_config`, for example `{method = "ngram", num_speculative_tokens = 4}`."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, by name."""
    start_timeout_s: Seconds = 600.0
    """Time limit of its start, in seconds."""
    join_s: Seconds = 300.0
    """How long the nodes of an engine on several hosts (`--nnodes`) wait for each other, at each start, in seconds."""

    def workers_per_node(self, num_nodes: int) -> int:
        """Return how many workers are on each of `num_nodes` nodes. Raises ConfigError if they cannot share them."""
        tp, pp = self.tensor_parallel_size, self.pipeline_parallel_size
        share, left = divmod(tp * pp, num_nodes)
        if left or not share:
            raise ConfigError(
                f"rollout.vllm.tensor_parallel_size = {tp} and pipeline_parallel_size = {pp} make "
                f"{counted(tp * pp, 'worker')}, which {num_nodes} nodes cannot share equally; change one of them"
            )
        return share


class EnvironmentSettings(SettingsSection):
    """The environment, which plays the turns of a trajectory."""

    kind: str = ""
    """Empty: a completion is the whole trajectory. `tools`: the model calls functions. `gym`: a text environment with
    Gymnasium's interface. `verifiers`: an environment of that library. `agent`: your program, which calls the model as
    an OpenAI client. Otherwise your own `async def`, as `module:name` or `path/to/file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment; see `docs/how-to/environments.md`."""
    max_turns: int = Field(default=8, ge=1, le=MAX_COUNT)
    """Limit on the model's replies in one trajectory."""
    turn_max_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """Limit on the tokens of one reply; 0 for what `sampling.max_tokens`, the limit for the trajectory, leaves."""
    max_branches: int = Field(default=256, ge=1, le=MAX_COUNT)
    """Limit on the conversations of one trajectory of `agent` or `verifiers` that are not part of another one: further
    ones are rejected with 429."""
    timeout_s: Seconds = 600.0
    """Time limit of one trajectory, in seconds; beyond it the status is `env_error`. Time does not count while the
    engine cannot generate: asleep, restarting, or without weights."""
    sandbox: SandboxLevel = "auto"
    """Sandbox of tools, agents and worlds of `gym`. `auto`: the strongest that this machine offers. `required`: one
    with namespaces, or the start fails. `bubblewrap`, `namespaces`, `landlock`, `process`: just this one; see
    `docs/how-to/sandboxes.md`."""
    needs: SandboxNeeds = SandboxNeeds()
    """What the code in the sandbox may reach."""


class ApiSettings(SettingsSection):
    """The OpenAI-compatible HTTP server of each replica."""

    enabled: bool = False
    """Start the server; each replica listens on a port of its own."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of rollout-0; rollout-1 takes the next one, and so on. 0 takes free ports, which the replicas log and write
    to `<run folder>/api/<replica>.json`."""
    key: Secret = ""
    """The API key of clients; empty to generate one, which is written to the same file as the port."""
    max_requests: int = Field(default=256, ge=1, le=MAX_COUNT)
    """Limit on concurrent requests; further ones are rejected with 429. Requests of episodes do not count: each episode
    has this limit for its own."""
    tool_parser: Literal["", "hermes", "llama"] = ""
    """Form of the model's tool calls, for requests with tools; empty to detect it from the chat template."""
    timeout_s: Seconds = 600.0
    """Time limit of one request, in seconds; beyond it the request fails with 504 and its tokens are dropped. Requests
    of an episode share the episode's limit, `rollout.environment.timeout_s`."""
    read_timeout_s: Seconds = 60.0
    """Time limit for a request's headers to arrive, and then for its body, in seconds; beyond it the connection is
    closed, with 408 for a body."""
    write_timeout_s: Seconds = 60.0
    """How long a client may read nothing of a response that waits for it, in seconds; then the connection is closed,
    and what its request still generates is dropped."""


class RolloutSettings(SettingsSection):
    """How a replica generates and adopts weights."""

    engine: str = "transformers"
    """The engine: `transformers`, `vllm`, `diffusion` for the model of [diffusion], or your own class as `module:Class`
    or `path/to/file.py:Class`."""
    max_engine_restarts: int = Field(default=3, ge=0, le=MAX_COUNT)
    """Limit on restarts of a lost engine within `engine_restart_window_s`; then the replica ends."""
    engine_restart_window_s: Seconds = 600.0
    """Period in which restarts are counted, in seconds."""
    engine_silence_s: Seconds = 300.0
    """An engine in processes of its own (`vllm`) counts as lost when it has requests and samples no token for this many
    seconds. Start-up and pauses do not count, but later compilation and the longest prompts do."""
    num_slots: int = Field(default=16, ge=0, le=MAX_SLOTS)
    """Groups that the controller may assign to this replica at a time. 0: it only serves requests, with the newest
    weights of the run (`starling serve --from`)."""
    max_rows: int = Field(default=128, ge=1, le=MAX_ROWS)
    """Limit on the sequences that are generated together."""
    kv_cache_mb: int = Field(default=0, ge=0, le=MAX_MIB)
    """Limit on the KV cache of the engine `transformers`, in MiB; 0 for none: it then grows with the running sequences.
    When it is full, the groups that started last wait and are prefilled again. For vLLM: `vllm.kv_cache_mb`."""
    max_model_len: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Limit on the tokens of a prompt with its completion; without it, the model's context, which it can be trained
    on."""
    max_media_bytes: int = Field(default=256 << 20, ge=1, le=900_000_000)
    """Limit on the bytes of a prompt's images and videos, both as the model's tensors (about 25 MB per megapixel) and
    as decoded pixels (3 MB per megapixel). They are sent and journaled with the completions; the journal cannot take
    more than the maximum of this setting."""
    media_timeout_s: Seconds = 60.0
    """Time limit for reading a prompt's images and videos, in seconds; then another rollout gets the group."""
    embedding_timeout_s: Seconds = 600.0
    """Time limit for the embeddings of a prompt of a diffusion model, in seconds; it includes the load of the text
    encoders. Then another rollout gets the group."""
    exclusive: bool = False
    """Generate each group in a batch of its own: slower, but independent of batching to the bit."""
    pull_timeout_s: Seconds = 60.0
    """Time limit of the pull of one version, in seconds; then it fails and the old version stays."""
    version_timeout_s: Seconds = 600.0
    """How long a group may wait here for new enough weights, in seconds, before it returns to the controller."""
    adoption: Literal["keep", "recompute", "salt", "finish"] = "keep"
    """What running requests do when new weights arrive. `keep`: continue with their KV cache. `recompute`: recompute it
    with the new weights. `salt`: continue with it, but share it with no later request. `finish`: finish first, while
    the weights wait."""
    finish_timeout_s: Seconds = 300.0
    """How long new weights wait under `finish`, in seconds, before running requests are recomputed instead."""
    double_buffer: bool = True
    """Pull into a staging area of the weights' size during generation, so that the engine pauses for the switch only.
    Without it the engine pauses for the whole pull, and needs memory for one bucket only."""
    load_weights: bool = False
    """Load the weights in `model.path` at the start, as version 0, instead of waiting for the policy's."""
    transport: TransportChoice = "auto"
    """Transport of weights from this replica to others that pull from it; as `policy.transport`."""
    vllm: VllmSettings = VllmSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    api: ApiSettings = ApiSettings()


def check_diffusion(rollout: RolloutSettings, diffusion: SamplerSettings | None, key: str = "rollout") -> None:
    """Check that engine and environment fit the model: `diffusion` is None for a language model.

    `key`: of `rollout`, in errors.

    Raises:
        ValueError: naming the setting and the remedy.
    """
    engine = rollout.engine
    if diffusion is None:
        if engine == "diffusion":
            raise ValueError(
                f"{key}.engine = 'diffusion' draws the samples of [diffusion], and there is none; add [diffusion], or "
                "choose the engine of a language model"
            )
        return
    if engine in ENGINES_OF_TEXT:
        raise ValueError(
            f"{key}.engine = {engine!r} generates with language models, and [diffusion] is for a diffusion model; set "
            f"{key}.engine = 'diffusion', or remove [diffusion]"
        )
    if kind := rollout.environment.kind:
        raise ValueError(
            f"{key}.environment.kind = {kind!r} plays turns of text, and the completions of [diffusion] are images or "
            "videos; remove it"
        )
    if rollout.api.enabled:
        raise ValueError(
            f"{key}.api.enabled = true serves completions of text, and those of [diffusion] are images or videos; "
            "remove it"
        )


class RolloutProcess(ServiceSettings):
    """All settings of a rollout process."""

    model: ModelSettings = ModelSettings()
    weights: WeightsSettings = WeightsSettings()
    diffusion: SamplerSettings | None = None
    """Samples of a diffusion model; without it the model is a language model."""
    rollout: RolloutSettings = RolloutSettings()

    @model_validator(mode="after")
    def _check_diffusion(self) -> Self:
        check_diffusion(self.rollout, self.diffusion)
        return self


class TeacherSettings(SettingsSection):
    """The teacher, which scores given tokens."""

    path: str = ""
    """A Hugging Face model folder, with weights. Its tokenizer must be that of the trained model."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type of its weights; log-probabilities are computed in float32."""
    device: str = "auto"
    """Device: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU if there is one."""
    top_k: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """Number of its most likely tokens to return at each position; 0 for only the log-probability of each sampled
    token."""
    num_slots: int = Field(default=4, ge=1, le=MAX_SLOTS)
    """Groups that the controller may assign to this teacher at a time; it scores one, and queues the others."""
    tokens_per_forward: int = Field(default=8192, ge=1, le=MAX_WHOLE)
    """Limit on the tokens of one forward pass, padding included; a longer completion has a pass of its own."""


class TeacherProcess(ServiceSettings):
    """All settings of a teacher process."""

    model: ModelSettings = ModelSettings()
    teacher: TeacherSettings = TeacherSettings()
