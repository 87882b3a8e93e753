"""The engine of a replica, and another one when it is lost."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from starling.common.service import host_name
from starling.common.wire import messages as wire
from starling.rollout.engine.base import EngineLostError, EngineSpec
from starling.rollout.engine.registry import make_engine

if TYPE_CHECKING:
    from starling.common.observe.process import StopSignal
    from starling.rollout.engine.base import Engine
    from starling.rollout.settings import RolloutProcess, RolloutSettings

log = structlog.get_logger(__name__)


class EngineFactory:
    """Makes the engine that `spec` describes, and makes it again, so often within so long as the settings say."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._restarts: deque[float] = deque()

    def make(self) -> Engine:
        """Make the first one.

        Raises:
            ConfigError: it cannot be made.
        """
        return make_engine(self.spec)

    def replace(self, lost: Engine, error: EngineLostError, stop: StopSignal) -> Engine:
        """Close `lost`, and make another one, unless `stop` comes.

        Raises:
            EngineLostError: too many were lost.
            Stopped: it came; there is no engine now.
        """
        lost.close()
        while True:
            self._count(error)
            log.warning("engine_made_again", reason=str(error), restarts=len(self._restarts))
            try:
                with stop.interruptible():
                    return make_engine(self.spec)
            except EngineLostError as again:
                error = again

    def _count(self, error: EngineLostError) -> None:
        settings, now = self.spec.rollout, time.monotonic()
        while self._restarts and now - self._restarts[0] > settings.engine_restart_window_s:
            self._restarts.popleft()
        if len(self._restarts) >= settings.max_engine_restarts:
            raise EngineLostError(
                f"the engine was lost, and made again {len(self._restarts)} times within "
                f"{settings.engine_restart_window_s:g} s already (rollout.max_engine_restarts): {error}"
            ) from error
        self._restarts.append(now)


def make_spec(
    path: Path, settings: RolloutProcess, name: str, config: Any, tokenizer: Any, wake: Callable[[], None]
) -> EngineSpec:
    """Return what the engine of the replica `name` is made of; `config` is that of the model in `path`.

    Raises:
        ConfigError: a longer sequence is wanted than the policy could train.
    """
    from starling.rollout.engine.model_config import end_token_ids, max_trainable_length

    return EngineSpec(
        path=path,
        model=settings.model,
        rollout=settings.rollout,
        weights=settings.weights,
        name=name,
        eos_token_ids=end_token_ids(tokenizer, path),
        max_model_len=max_trainable_length(config, settings.rollout.max_model_len),
        wake=wake,
    )


def hello_of(settings: RolloutSettings, engine: Engine) -> wire.Hello:
    """Return how a replica with `engine` introduces itself."""
    return wire.Hello(
        role="rollout",
        host=host_name(),
        pid=os.getpid(),
        num_slots=settings.num_slots,
        version=engine.version,
        has_layout=True,
        serves=engine.serves,
    )


# JOINED from starling.rollout.shell.speed: How fast an engine is, as the heartbeats tell it.

if TYPE_CHECKING:
    from starling.rollout.engine.base import Engine

EVERY_S = 0.5


class ThroughputMeter:
    """Measures the tokens that an engine samples in a second, now and then."""

    def __init__(self) -> None:
        self._num_tokens, self._measured_at = 0, time.monotonic()

    def begin(self) -> None:
        """Another engine counts from 0."""
        self._num_tokens = 0

    def measured(self, engine: Engine, now: float) -> dict[str, float] | None:
        """Return the gauges as of `now`, or None when they stay what they were."""
        elapsed, num_tokens = now - self._measured_at, engine.num_tokens - self._num_tokens
        if elapsed < EVERY_S:
            return None
        self._num_tokens, self._measured_at = engine.num_tokens, now
        if not num_tokens and not engine.num_running:  # an idle engine's speed is what it was
            return None
        return {"tokens_per_s": num_tokens / elapsed, "rows": engine.num_running}
