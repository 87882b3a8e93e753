"""Kinds of workers: scorers that need the same share worker processes; the others have processes of their own.

Evaluation scorers share none with those that are trained on, so that their code cannot change a reward, and no score
that is trained on waits for theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from starling.common.sandbox.settings import SandboxNeeds
from starling.reward.score.workers.protocol import ScorerSpec
from starling.reward.settings import CODE, JUDGE, SERVICE, RewardSettings, ScorerSettings

_SHARE: Final = 0.9
"""Of the time limit of a scorer that waits for others, and then says what is missing, and is not killed."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Workers that are alike, and their scorers."""

    needs: SandboxNeeds
    scorers: tuple[ScorerSpec, ...]
    num_workers: int
    python: Path | None = None
    """Interpreter of their Python environment; None for the service's own."""
    device: str = ""
    """`cpu`, `cuda:<number>`, or empty."""
    memory_mb: int = 0
    """Limit on the memory of each worker, with all that it starts; 0 for none."""


def kinds_of(settings: RewardSettings) -> list[WorkerKind]:
    """Return the kinds of workers of a service, with their scorers."""
    kinds: dict[tuple[object, ...], WorkerKind] = {}
    for index, scorer in enumerate(settings.scorers):
        spec = ScorerSpec(index, scorer.name, _options(scorer, scorer.timeout_s or settings.timeout_s))
        alone = index if scorer.num_workers is not None else None
        key = (scorer.use, scorer.own_needs, scorer.python, scorer.device, scorer.memory_mb, alone)
        shared = kinds[key].scorers if key in kinds else ()
        kinds[key] = _kind(scorer, (*shared, spec), settings.num_workers)
    return list(kinds.values())


def _options(scorer: ScorerSettings, timeout_s: float) -> dict[str, Any]:
    """Return the options of a scorer; of one that waits for others, with the time in which it must answer."""
    waits = scorer.name in (CODE, JUDGE, SERVICE)
    return {"time_limit_s": _SHARE * timeout_s, **scorer.options} if waits else scorer.options


def _kind(scorer: ScorerSettings, specs: tuple[ScorerSpec, ...], num_workers: int) -> WorkerKind:
    return WorkerKind(
        needs=scorer.own_needs,
        scorers=specs,
        num_workers=scorer.num_workers or num_workers,
        python=scorer.python,
        device=scorer.device,
        memory_mb=scorer.memory_mb or 0,
    )
