"""Pairs of ranks of an adoption: the distance that the plan saw, and the forecast beside what the reader measured."""

from __future__ import annotations

from typing import Any, Final, get_args

from starling.common.errors import WeightsError
from starling.common.wire import messages as wire
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.weightsync.costs.pairs import PullForecast
from starling.weightsync.offers.offer import Transport

TRANSPORTS: Final = frozenset(get_args(Transport))
MAX_SECONDS: Final = 1e9
MAX_RANK_PAIRS: Final = 1 << 18
"""Most pairs of ranks, with and without traffic, that are forecast: 4,096 at a source and 64 at its reader. It takes a
tenth of a second at most; sixteen million would take three."""


def noted_pairs(
    state: ControllerState, reader: Member, command: wire.AdoptWeights | None, message: wire.WeightsAdopted
) -> dict[str, Any]:
    """Return the fields of a line `adopted` that compare its pairs with their forecast; none without a forecast.

    `command` is that of the adoption, None if an earlier incarnation of the controller sent it. The reader reports how
    much it read from which rank, and may lie: only reads of pairs that the forecast has are noted.
    """
    forecast = _forecast(state, reader, command)
    if forecast is None or command is None:
        return {}
    source = command.relays[0] if command.relays else command.source
    reads = {(read.source_rank, read.rank): read for read in message.reads[: wire.MAX_READS] if read.source == source}
    pairs = []
    for pair in forecast.pairs:
        read = reads.get((pair.source_rank, pair.rank))
        pairs.append(
            {
                "source_rank": pair.source_rank,
                "rank": pair.rank,
                "link": pair.link,
                "bytes": pair.num_bytes,
                "expected_s": pair.seconds,
                "transport": read.transport if read is not None and read.transport in TRANSPORTS else "",
                "sent_bytes": min(max(read.num_bytes, 0), 2 * pair.num_bytes) if read is not None else None,
                "read_s": _seconds(read.seconds) if read is not None else None,
            }
        )
    links = {
        name: {"pairs": link.num_pairs, "bytes": link.num_bytes, "expected_s": link.seconds}
        for name, link in forecast.links.items()
    }
    return {"expected_s": forecast.seconds, "links": links, "pairs": pairs}


def _forecast(state: ControllerState, reader: Member, command: wire.AdoptWeights | None) -> PullForecast | None:
    """Return the forecast of an adoption; None if its command or a layout is no longer known, or one is too large.

    Either source may have joined again with another layout since the command was sent. A relay then has other ranks
    than its reader, and other boxes than it has sent.
    """
    members, plans = state.replicas.membership.members, state.weights.plans
    source = members.get(command.source) if command is not None else None
    if command is None or source is None or source.layout is None or reader.layout is None:
        return None
    relay = members.get(command.relays[0]) if command.relays else source
    if relay is None or relay.layout is None:
        return None
    if len(relay.layout.ranks) * len(reader.layout.ranks) > MAX_RANK_PAIRS:
        return None
    try:
        if relay is source:
            return plans.forecast(source.layout, reader.layout)
        if plans.key(source.layout, relay.layout) == command.layout:
            return plans.relayed_forecast(source.layout, relay.layout, reader.layout)
    except WeightsError:  # there is no plan from the other layout
        pass
    return None


def _seconds(measured: float) -> float:
    return min(max(measured, 0.0), MAX_SECONDS) if measured == measured else 0.0
