"""Runs whose controller is fuzzed: each with other means of the controller."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from starling.common.wire import messages as wire
from starling.controller.core.plan import LeaseTimeouts, RunPlan

GROUP_SIZE: Final = 2
PLAIN: Final = RunPlan(
    seed=0,
    sampling=wire.Sampling(max_tokens=3),
    eval_sampling=wire.Sampling(max_tokens=3, temperature=0.0),
    num_steps=1_000_000,
    prompts_per_step=4,
    group_size=GROUP_SIZE,
    max_staleness=1,
    save_every=20,
    evaluate_every=50,
    heartbeat_s=2.0,
    lease_s=30.0,
    num_teachers=1,
    teacher_top_k=1,
    timeouts=LeaseTimeouts(generate_s=20.0, score_s=20.0, teach_s=20.0),
)
TRUNCATED: Final = replace(PLAIN, sampling=wire.Sampling(max_tokens=3, top_k=2, logprobs="truncated"))
COLOCATED: Final = replace(
    PLAIN, colocate=True, lease_s=6.0,
    timeouts=LeaseTimeouts(generate_s=20.0, score_s=20.0, teach_s=20.0, publish_s=20.0, adopt_s=20.0, sleep_s=5.0),
)  # fmt: skip
RELAYS: Final = replace(PLAIN, relay_from_bytes=0, sync_every=0, max_staleness=2)
VARIANTS: Final = {
    "plain": PLAIN,
    "relays": RELAYS,
    "filtered": replace(PLAIN, dynamic_sampling=True),
    "small": replace(PLAIN, dynamic_sampling=True, prompts_per_step=2, filter_limit=8),
    "truncated": TRUNCATED,
    "colocated": COLOCATED,
    "everything": replace(COLOCATED, dynamic_sampling=True, sampling=TRUNCATED.sampling),
}
"""The plans, by the name of the variant."""
EVENT_S: Final = {"colocated": 0.02, "everything": 0.02}
"""Simulated seconds between two events, where it is not 0.005: devices are switched twice for each step."""
CHANGES: Final = (
    ("sampling.temperature", (0.8, 1.0, -1.0)),
    ("sampling.max_tokens", (2.0, 3.0, 4.0)),
    ("sampling.top_k", (0.0, 1.0, 2.0, 3.0)),
    ("rl.max_staleness", (0.0, 1.0, 2.0)),
    ("rl.max_tries", (1.0, 2.0, 4.0)),
    ("evaluation.every", (0.0, 20.0, 50.0)),
    ("controller.save_every", (5.0, 20.0)),
    ("policy.algorithm.clip_high", (0.2, 0.28)),
    ("no.such.setting", ("x",)),
)
"""What an operator sets, and some of which is refused."""
TEMPERATURES: Final = {1.0, 0.8}
"""At which groups of steps are ever sampled."""
