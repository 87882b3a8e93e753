"""Statistics of vLLM's scheduler: the share of the KV cache in use, its requests, and hits of its prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine of vLLM has reported last."""

    kv_cache_ratio: float
    """Share of the blocks of the KV cache that requests hold, 0 to 1; those that are only kept for reuse are free."""
    num_running: int
    num_waiting: int
    """Requests in its queue, also those that it has preempted because the KV cache was full."""


IDLE: Final = EngineLoad(0.0, 0, 0)


class SchedulerStatistics:
    """The newest statistics of each engine behind one AsyncLLM, which the engine's thread writes and any thread reads.

    vLLM reports after each step of its scheduler, and has none while it has no requests.
    """

    def __init__(self) -> None:
        self._loads: dict[int, EngineLoad] = {}
        self.num_queried_tokens = self.num_hit_tokens = 0
        """Prompt tokens that were looked up in the prefix cache, and those that were found."""

    def record(self, engine: int, stats: Any) -> None:
        """Record vLLM's `SchedulerStats` of a step of engine number `engine`."""
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self._loads = {**self._loads, engine: EngineLoad(stats.kv_cache_usage, stats.num_running_reqs, waiting)}
        self.num_queried_tokens += stats.prefix_cache_stats.queries
        self.num_hit_tokens += stats.prefix_cache_stats.hits

    @property
    def load(self) -> EngineLoad:
        """The largest share of a KV cache, and the sums of the requests."""
        loads = self._loads.values() or (IDLE,)
        return EngineLoad(
            max(one.kv_cache_ratio for one in loads),
            sum(one.num_running for one in loads),
            sum(one.num_waiting for one in loads),
        )


def stat_logger(statistics: SchedulerStatistics, *, replaces_prometheus: bool) -> type[Any]:
    """Return a class for the argument `stat_loggers` of AsyncLLM, which records `statistics`.

    With any such logger vLLM also fills its own metrics for Prometheus, unless the logger derives from theirs. They
    cost time in each step, and no endpoint of a rollout serves them.
    """
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger

    parent: type[Any] = PrometheusStatLogger if replaces_prometheus else AggregateStatLoggerBase

    class StatLogger(parent):  # type: ignore[misc]
        """Records the statistics of all engines. It has nothing of its parent's state."""

        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            del vllm_config, engine_indexes

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            del iteration_stats, mm_cache_stats
            if scheduler_stats is not None:
                statistics.record(engine_idx, scheduler_stats)

        def log_engine_initialized(self) -> None:
            pass

        def log(self) -> None:
            pass

        def record_sleep_state(self, *state: Any) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

    return StatLogger
