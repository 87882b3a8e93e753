"""Largest and smallest numbers in settings and in what environments return.

They are what timers, arithmetic and memory take, far beyond any sensible run. A value outside is a mistake, and is
refused where it is given: further on it would be an overflow in some library, or a machine without memory.
"""

from __future__ import annotations

from typing import Final

MAX_SECONDS: Final = 2e6
"""23 days; timers of sockets count milliseconds in 32 bits."""
MAX_WHOLE: Final = 2**31 - 1
"""Of a whole number without a nearer bound: what every engine and the wire can carry."""
MAX_STEPS: Final = 10**9
"""Steps of a run, and intervals in steps."""
MAX_TOKENS: Final = 1 << 24
"""Tokens of a sequence or a batch; float32 counts exactly up to here, also the positions of rotary embeddings."""
MAX_GROUPS: Final = 10**6
"""Groups or examples that exist at a time; the controller keeps some kilobytes of each."""
MAX_ROWS: Final = 1 << 16
"""Completions of one prompt, and sequences that are generated together."""
MAX_SLOTS: Final = 4096
"""Groups that one rollout, reward or teacher works on at a time; the controller refuses a replica that offers more."""
MAX_STALENESS: Final = 1000
"""Weight versions between sampling and training."""
MAX_REPLICAS: Final = 10_000
"""Replicas of one role in a run."""
MAX_PROCESSES: Final = 1024
"""Processes, threads or devices on one machine."""
MAX_COUNT: Final = 10**6
"""Restarts, repetitions, queued items and versions that are kept."""
MAX_MIB: Final = 1 << 20
"""A file or a cache, in MiB: one TiB."""
MAX_COEFFICIENT: Final = 1e6
"""Coefficients, ratios and bounds on metrics; their products stay within float32."""
MAX_LEARNING_RATE: Final = 1e3
MAX_METRICS: Final = 1000
"""Metrics of one trajectory."""
MAX_METRIC_CHARACTERS: Final = 200
MAX_REWARD: Final = 1e15
"""Largest absolute reward and score: its square is finite in float32."""
MAX_SCORES: Final = 64
"""Scores of a group by name, those of evaluation scorers apart, unless the recipe has more scorers."""
MAX_SCORE_CHARACTERS: Final = 200
"""Of the name of a score."""
"""Characters of the name of such a metric."""
MIN_TEMPERATURE: Final = 1e-3
"""Of a temperature other than 0: logits that are divided by less overflow."""
MAX_TEMPERATURE: Final = 1e3
