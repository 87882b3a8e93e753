"""Metrics of the HTTP front end in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from starling.reward.http.status import ServiceStatus
from starling.reward.http.table import RequestTable


def render(status: ServiceStatus, table: RequestTable) -> str:
    """Return all metrics as text."""
    gauges = status.gauges
    lines = [
        *_family("starling_reward_requests", "gauge", "Requests and results that are held.", {"": len(table)}),
        *_family("starling_reward_pending_samples", "gauge", "Samples that are being scored.", {"": table.num_samples}),
        *_family("starling_reward_held_bytes", "gauge", "Memory of requests and results.", {"": table.held_bytes}),
        *_family(
            "starling_reward_store_available",
            "gauge",
            "Whether the store of requests can be reached.",
            {"": 0.0 if table.problem else 1.0},
        ),
        *_family("starling_reward_pending_scores", "gauge", "Scores to come.", {"": gauges.get("queue_depth", 0.0)}),
        *_family("starling_reward_workers", "gauge", "Workers that are ready.", {"": gauges.get("workers_ready", 0.0)}),
        *_family(
            "starling_reward_workers_replaced_total",
            "counter",
            "Workers that ended or exceeded a limit.",
            {"": gauges.get("workers_replaced", 0.0)},
        ),
        *_decoding(gauges),
        *_family(
            "starling_reward_scorers_quarantined",
            "gauge",
            "Scorers of which no worker can be started.",
            {"": gauges.get("scorers_quarantined", 0.0)},
        ),
        *_family(
            "starling_reward_samples_total",
            "counter",
            "Samples that were answered, by status.",
            {f'{{status="{name}"}}': number for name, number in sorted(status.answered.items())},
        ),
    ]
    return "\n".join(lines) + "\n"


def _decoding(gauges: Mapping[str, float]) -> list[str]:
    """Return the metrics of the decoding of latents; there are none without a decoder."""
    if "samples_decoded" not in gauges:
        return []
    families = {
        "starling_reward_decoded_samples_total": ("counter", "Samples whose latents were decoded.", "samples_decoded"),
        "starling_reward_decode_seconds_total": ("counter", "Time that decoders took for them.", "decode_seconds"),
        "starling_reward_decoders": ("gauge", "Workers of decoders that are ready.", "decoders_ready"),
        "starling_reward_decoders_replaced_total": (
            "counter",
            "Workers of decoders that ended or exceeded a limit.",
            "decoders_replaced",
        ),
    }
    found = (_family(name, kind, text, {"": gauges[gauge]}) for name, (kind, text, gauge) in families.items())
    return [line for family in found for line in family]


def _family(name: str, kind: str, text: str, values: dict[str, float]) -> list[str]:
    """Return the lines of a metric, given its values by their labels."""
    return [
        f"# HELP {name} {text}",
        f"# TYPE {name} {kind}",
        *(f"{name}{key} {value!r}" for key, value in values.items()),
    ]
