"""Creation and restarts of a replica's engine, and the measurement of its throughput."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.folder_digests import model_digest
from starling.common.kinds import KINDS
from starling.common.service import host_name
from starling.common.wire import messages as wire
from starling.rollout.engine.base import EngineLostError, EngineSpec
from starling.rollout.engine.registry import make_engine

if TYPE_CHECKING:
    from starling.common.nodes.nodes import NodeSetup
    from starling.common.observe.process import StopSignal
    from starling.rollout.engine.base import Engine
    from starling.rollout.settings import RolloutProcess, RolloutSettings
    from starling.weightsync.transports.endpoints import ServingOptions

log = structlog.get_logger(__name__)

MEASURE_INTERVAL_S = 0.5


class EngineFactory:
    """Creates the engine of `spec`, and restarts it when it is lost, as often as the settings allow."""

    def __init__(self, spec: EngineSpec) -> None:
        """Prepare; nothing is started yet."""
        self.spec = spec
        self.checkpoint = ""
        """The digest of the model's folder, read while the engine loaded it; empty where a policy sends the weights."""
        self._restarts: deque[float] = deque()

    def make(self) -> Engine:
        """Create the engine, and compare the checkpoint that it loads with that of the engine before, if there was one.

        Raises:
            ConfigError: the settings do not allow it, or the checkpoint has changed.
        """
        if not self.spec.has_own_weights:
            return make_engine(self.spec)
        thread = ThreadPoolExecutor(1, "digest")  # reads the files while the engine loads them
        digest = thread.submit(model_digest, self.spec.path)
        thread.shutdown(wait=False)
        engine = make_engine(self.spec)
        try:
            self._note(digest.result())
        except BaseException:  # no process of the engine may be left behind, whatever the exception
            engine.close()
            raise
        return engine

    def _note(self, digest: str) -> None:
        if self.checkpoint and digest != self.checkpoint:
            raise ConfigError(
                f"the checkpoint in {self.spec.path} has changed since this replica loaded it: its digest was "
                f"{self.checkpoint}, and now it is {digest}; restore it, or begin a new run"
            )
        self.checkpoint = digest

    def replace(self, lost: Engine, error: EngineLostError, stop: StopSignal) -> Engine:
        """Close the `lost` engine and start another one, unless `stop` is requested.

        Raises:
            ConfigError: the checkpoint has changed.
            EngineLostError: too many engines were lost.
            ServiceStopped: the process is to stop; there is no engine now.
        """
        lost.close()
        while True:
            self._count(error)
            log.warning("engine_restarted", reason=str(error), restarts=len(self._restarts))
            try:
                with stop.interruptible():
                    return self.make()
            except EngineLostError as again:
                error = again

    def _count(self, error: EngineLostError) -> None:
        settings, now = self.spec.rollout, time.monotonic()
        while self._restarts and now - self._restarts[0] > settings.engine_restart_window_s:
            self._restarts.popleft()
        if len(self._restarts) >= settings.max_engine_restarts:
            raise EngineLostError(
                f"the engine was lost, and restarted {counted(len(self._restarts), 'time')} within "
                f"{settings.engine_restart_window_s:g} s already (rollout.max_engine_restarts): {error}"
            ) from error
        self._restarts.append(now)


def make_spec(
    path: Path,
    settings: RolloutProcess,
    name: str,
    config: Any,
    tokenizer: Any,
    wake: Callable[[], None],
    serving: ServingOptions | None = None,
    nodes: NodeSetup | None = None,
) -> EngineSpec:
    """Return the specification of the replica's engine; `config` and `tokenizer` belong to the model in `path`, and
    are None for a diffusion model.

    Raises:
        ConfigError: the sequence length is more than the policy can train.
    """
    from starling.rollout.engine.model_config import end_token_ids, max_trainable_length

    is_text = settings.diffusion is None
    return EngineSpec(
        path=path,
        has_own_weights=settings.rollout.load_weights and not KINDS[settings.run.kind].trains,
        model=settings.model,
        rollout=settings.rollout,
        weights=settings.weights,
        name=name,
        eos_token_ids=end_token_ids(tokenizer, path) if is_text else (),
        max_model_len=max_trainable_length(config, settings.rollout.max_model_len) if is_text else None,
        wake=wake,
        serving=serving,
        nodes=nodes,
        diffusion=settings.diffusion,
    )


def hello_of(settings: RolloutSettings, engine: Engine, checkpoint: str) -> wire.Hello:
    """Return the `Hello` of a replica with `engine`. `checkpoint`: see there."""
    return wire.Hello(
        role="rollout",
        host=host_name(),
        pid=os.getpid(),
        num_slots=settings.num_slots,
        version=engine.version,
        has_layout=True,
        serves=engine.serves,
        checkpoint=checkpoint,
    )


class ThroughputMeter:
    """Measures the engine's tokens per second, at intervals."""

    def __init__(self) -> None:
        self._num_tokens, self._measured_at = 0, time.monotonic()
        self._gauges: dict[str, float] = {}

    def reset(self) -> None:
        """Start at 0 tokens for a new engine."""
        self._num_tokens = 0

    def measured(self, engine: Engine, now: float) -> dict[str, float] | None:
        """Return the gauges at `now`, or None when they have not changed."""
        elapsed, num_tokens = now - self._measured_at, engine.num_tokens - self._num_tokens
        if elapsed < MEASURE_INTERVAL_S:
            return None
        self._num_tokens, self._measured_at = engine.num_tokens, now
        gauges = {"rows": float(engine.num_running)}
        if num_tokens or engine.num_running:
            gauges["tokens_per_s"] = num_tokens / elapsed
        elif "tokens_per_s" in self._gauges:  # an idle engine keeps its last throughput
            gauges["tokens_per_s"] = self._gauges["tokens_per_s"]
        else:  # and has none before its first tokens
            return None
        used = getattr(engine, "kv_cache_ratio", None)
        if used is not None:
            gauges["kv_cache_share"] = used
        before, self._gauges = self._gauges, gauges
        return None if gauges == before else gauges
