"""Metrics of a rollout and of a teacher, served by their HTTP endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starling.common.observe.metrics import Family, Samples

if TYPE_CHECKING:
    from starling.rollout.engine.base import Engine
    from starling.weightsync.puller.report import PullReport

FAMILIES: Final = (
    Family("starling_rollout_version", "gauge", "Weight version in use; -1 for none."),
    Family("starling_rollout_rows", "gauge", "Completions that are being decoded."),
    Family("starling_rollout_waiting_groups", "gauge", "Groups that wait for a free row."),
    Family(
        "starling_rollout_waiting_group_seconds_total",
        "counter",
        "Time that groups have waited for a row, summed over groups; over the number of groups, it is the mean.",
    ),
    Family("starling_rollout_groups_total", "counter", "Groups that have ended, by how.", ("outcome",)),
    Family("starling_rollout_tokens_total", "counter", "Tokens that the engine has sampled."),
    Family(
        "starling_rollout_kv_cache_ratio",
        "gauge",
        "Share of the KV cache that is in use, where the engine tells it and has a limit.",
    ),
    Family(
        "starling_rollout_scheduled_requests",
        "gauge",
        "Requests of vLLM's scheduler that run, or wait, also because it preempted them for lack of KV cache.",
        ("state",),
    ),
    Family(
        "starling_rollout_prefix_cache_queried_tokens_total",
        "counter",
        "Prompt tokens that vLLM has looked up in its prefix cache.",
    ),
    Family("starling_rollout_prefix_cache_hit_tokens_total", "counter", "Of these, the tokens that it has found."),
    Family("starling_rollout_pull_seconds", "summary", "Time of the pulls of weights that succeeded."),
    Family("starling_rollout_pulled_bytes_total", "counter", "Bytes of the versions that were pulled."),
    Family("starling_rollout_pulls_failed_total", "counter", "Pulls of weights that failed."),
    Family("starling_rollout_engine_restarts_total", "counter", "Engines that were lost and replaced."),
)
TEACHER_FAMILIES: Final = (
    Family("starling_teacher_queue_depth", "gauge", "Groups that wait to be scored."),
    Family("starling_teacher_groups_total", "counter", "Groups that were scored, or cannot be, by how.", ("outcome",)),
    Family("starling_teacher_tokens_total", "counter", "Tokens that were scored."),
)


class RolloutMetrics:
    """Counts of one rollout. It belongs to the working thread; `now` is in monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._noted_at = now
        self._waiting_s = self._pull_s = 0.0
        self._num_pulls = self._num_pulled_bytes = self._num_failed_pulls = self._num_restarts = 0
        self._num_tokens_before = self._num_queried_before = self._num_hits_before = 0
        """Of engines that were lost."""
        self._groups = {"ok": 0, "failed": 0}

    def note(self, engine: Engine, now: float) -> None:
        """Note what the engine does, at intervals of some tenths of a second."""
        self._waiting_s += engine.num_waiting * (now - self._noted_at)
        self._noted_at = now

    def note_group(self, *, ok: bool) -> None:
        """Note the end of a group."""
        self._groups["ok" if ok else "failed"] += 1

    def note_pull(self, report: PullReport | None) -> None:
        """Note the end of a pull; without a report it has failed."""
        if report is None:
            self._num_failed_pulls += 1
            return
        self._num_pulls += 1
        self._pull_s += report.seconds
        self._num_pulled_bytes += report.size_bytes

    def note_lost(self, engine: Engine) -> None:
        """Note that the engine is lost, and is replaced."""
        self._num_restarts += 1
        self._num_tokens_before += engine.num_tokens
        queried, hits = getattr(engine, "prefix_cache_tokens", (0, 0))
        self._num_queried_before += queried
        self._num_hits_before += hits

    def samples(self, engine: Engine, version: int) -> Samples:
        """Return all samples. `version`: of the weights in use."""
        found: Samples = {
            ("starling_rollout_version", ()): version,
            ("starling_rollout_rows", ()): engine.num_running,
            ("starling_rollout_waiting_groups", ()): engine.num_waiting,
            ("starling_rollout_waiting_group_seconds_total", ()): self._waiting_s,
            ("starling_rollout_tokens_total", ()): self._num_tokens_before + engine.num_tokens,
            ("starling_rollout_pull_seconds_sum", ()): self._pull_s,
            ("starling_rollout_pull_seconds_count", ()): self._num_pulls,
            ("starling_rollout_pulled_bytes_total", ()): self._num_pulled_bytes,
            ("starling_rollout_pulls_failed_total", ()): self._num_failed_pulls,
            ("starling_rollout_engine_restarts_total", ()): self._num_restarts,
        }
        for outcome, number in self._groups.items():
            found["starling_rollout_groups_total", (("outcome", outcome),)] = number
        # Only some engines have a cache of their own; it is no part of the protocol that custom engines implement.
        if (used := getattr(engine, "kv_cache_ratio", None)) is not None:
            found["starling_rollout_kv_cache_ratio", ()] = used
        if (load := getattr(engine, "scheduler_load", None)) is not None:
            for state, number in (("running", load.num_running), ("waiting", load.num_waiting)):
                found["starling_rollout_scheduled_requests", (("state", state),)] = number
        if (tokens := getattr(engine, "prefix_cache_tokens", None)) is not None:
            queried, hits = tokens
            found["starling_rollout_prefix_cache_queried_tokens_total", ()] = self._num_queried_before + queried
            found["starling_rollout_prefix_cache_hit_tokens_total", ()] = self._num_hits_before + hits
        return found


class TeacherMetrics:
    """Counts of one teacher. It belongs to the working thread."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._groups = {"ok": 0, "failed": 0}

    def note_group(self, num_tokens: int, *, ok: bool) -> None:
        """Note a group of so many tokens; not `ok` for one that no teacher can score."""
        self._groups["ok" if ok else "failed"] += 1
        self._num_tokens += num_tokens if ok else 0

    def samples(self, num_waiting: int) -> Samples:
        """Return all samples. `num_waiting`: groups that wait."""
        return {
            ("starling_teacher_queue_depth", ()): num_waiting,
            ("starling_teacher_tokens_total", ()): self._num_tokens,
            **{
                ("starling_teacher_groups_total", (("outcome", outcome),)): number
                for outcome, number in self._groups.items()
            },
        }
