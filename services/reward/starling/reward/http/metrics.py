"""Metrics of the HTTP front end in the text format of Prometheus."""

from __future__ import annotations

from typing import Final

from starling.common.observe.metrics import Family, Samples
from starling.common.observe.metrics import render as render_text
from starling.reward.http.status import ServiceStatus
from starling.reward.http.table import RequestTable
from starling.reward.score.metrics import FAMILIES as WORKER_FAMILIES
from starling.reward.score.metrics import GAUGES, gauge_samples

REQUEST_FAMILIES: Final = (
    Family("starling_reward_requests", "gauge", "Requests and results that are held."),
    Family("starling_reward_pending_samples", "gauge", "Samples that are being scored."),
    Family("starling_reward_held_bytes", "gauge", "Memory of requests and results."),
    Family("starling_reward_store_available", "gauge", "Whether the store of requests can be reached."),
    Family("starling_reward_samples_total", "counter", "Samples that were answered, by status.", ("status",)),
)
FAMILIES: Final = (*REQUEST_FAMILIES, *WORKER_FAMILIES)
OF_DECODERS: Final = frozenset(family.name for gauge, family in GAUGES.items() if "decode" in gauge)


def render(status: ServiceStatus, table: RequestTable) -> str:
    """Return all metrics as text; there are none of decoders without a decoder."""
    samples: Samples = {
        ("starling_reward_requests", ()): len(table),
        ("starling_reward_pending_samples", ()): table.num_samples,
        ("starling_reward_held_bytes", ()): table.held_bytes,
        ("starling_reward_store_available", ()): 0.0 if table.problem else 1.0,
        **gauge_samples(status.gauges),
        **status.samples,
    }
    for name, number in sorted(status.answered.items()):
        samples["starling_reward_samples_total", (("status", name),)] = number
    has_decoder = "samples_decoded" in status.gauges
    return render_text((one for one in FAMILIES if has_decoder or one.name not in OF_DECODERS), samples)
