"""Faults: each is injected into a pair that holds a version, and returns the outcome at the destination."""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch
from fault_pair import FaultPair, Outcome, Trigger, do_nothing, require, with_address
from fault_proxy import Direction, Flip, proxy
from weights_peers import ANSWER_S, BUCKET_BYTES, die_reading, weights

from starling.common.errors import WeightsError
from starling.weightsync.layouts.checkpoint import create_folder, open_folder
from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.plan.layout import decode_layout, encode
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

Kind = Literal[
    "source killed",
    "source stalled",
    "reader killed",
    "wire flipped",
    "snapshot flipped",
    "ticket wrong",
    "snapshot revoked",
    "cancelled",
    "disk full",
]

STALLED_S: Final = 0.3
"""Deadline of a pull whose source is stopped."""
FLIPPED_S: Final = 1.0
"""Deadline of a pull with a flipped bit: a length that has grown is never reached."""
WHOLE: Final = ("counts", "odd", "turned")
"""Tensors that are never sent as deltas; their digest is computed at publication."""
REFUSED: Final = 3
"""Exit code of an export that failed with a WeightsError."""


def _coin(pair: FaultPair) -> bool:
    return pair.draw.random() < 0.5


def _trigger(pair: FaultPair, act: Callable[[], object] = do_nothing, *, cancels: bool = False) -> Trigger:
    return Trigger(pair.draw.randrange(pair.num_steps), act, cancels=cancels)


def kill_source(pair: FaultPair) -> Outcome:
    """Kill the source with SIGKILL, at any step."""

    def kill() -> None:
        pair.source.signal(signal.SIGKILL)
        pair.source.process.join(ANSWER_S)

    trigger = _trigger(pair, kill)
    outcome = pair.pull(pair.source.publish(), in_place=_coin(pair), cancelled=trigger)
    trigger.fire()
    pair.restart()
    return outcome


def stall_source(pair: FaultPair) -> Outcome:
    """Stop the source with SIGSTOP, at any step; it continues soon, or after the pull."""
    trigger = _trigger(pair, lambda: pair.source.signal(signal.SIGSTOP))
    offer, patient = pair.source.publish(), _coin(pair)
    timer = threading.Timer(STALLED_S / 2, lambda: pair.source.signal(signal.SIGCONT))
    if patient:
        timer.start()
    try:
        deadline_s = ANSWER_S if patient and pair.transport != "local" else STALLED_S
        return pair.pull(offer, in_place=_coin(pair), deadline_s=deadline_s, cancelled=trigger)
    finally:
        trigger.fire()
        timer.cancel()
        if patient:
            timer.join()
        pair.source.signal(signal.SIGCONT)


def kill_reader(pair: FaultPair) -> Outcome:
    """Kill another reader of the same version in mid-read."""
    offer = pair.source.publish()
    victim: Any = mp.get_context("forkserver").Process(
        target=die_reading, args=(encode(pair.source.layout), encode(offer))
    )
    victim.start()
    victim.join(ANSWER_S)
    require(victim.exitcode == -signal.SIGKILL, f"a reader ended with {victim.exitcode}")
    victim.close()
    return pair.expect(pair.pull(offer, in_place=_coin(pair)), "adopted")


def flip_wire(pair: FaultPair) -> Outcome:
    """Flip one bit anywhere in requests or answers; early bytes more often, because they are rarely payload."""
    offer, draw = pair.source.publish(), pair.draw
    direction: Direction = "requests" if _coin(pair) else "answers"
    most = pair.sent[direction]
    at = draw.randrange(most) if _coin(pair) else int(most ** draw.random()) - 1
    with proxy(offer.ranks[0].address, Flip(direction, at, draw.randrange(8))) as between:
        proxied = with_address(offer, between.address)
        return pair.pull(proxied, in_place=_coin(pair), deadline_s=FLIPPED_S)


def flip_snapshot(pair: FaultPair) -> Outcome:
    """Flip one bit in the publisher's snapshot, after it was digested and before it is read."""
    offer = pair.source.publish()
    name = pair.draw.choice(WHOLE)
    content = weights(offer.version)[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    require(_flip_bit_of_arena(pair, content), f"{name} of version {offer.version} is not in the snapshot")
    outcome = pair.pull(offer, in_place=_coin(pair))
    if outcome == "adopted" and pair.report is not None and pair.report.num_deltas:
        return outcome  # the flipped bit was in no delta, and did not travel
    return pair.expect(outcome, "stale", "torn")


def _flip_bit_of_arena(pair: FaultPair, content: bytes) -> bool:
    """Flip one bit of `content` in the memory of the publisher: no other process can write to its file."""
    process = Path(f"/proc/{pair.source.process.pid}")
    lines = (process / "maps").read_text().splitlines()
    with (process / "mem").open("r+b", buffering=0) as memory:
        for line in (line for line in lines if "/memfd:starling-snapshots" in line and "w" in line.split()[1]):
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            at = os.pread(memory.fileno(), end - begin, begin).find(content)
            if at >= 0:
                place = begin + at + pair.draw.randrange(len(content))
                flipped = os.pread(memory.fileno(), 1, place)[0] ^ 1 << pair.draw.randrange(8)
                os.pwrite(memory.fileno(), bytes([flipped]), place)
                return True
    return False


def forge_secret(pair: FaultPair) -> Outcome:
    """Open with a random secret, or that of the previous version."""
    old, offer = pair.source.publish(), pair.source.publish()
    secret = old.ranks[0].secret if _coin(pair) else secrets.token_hex(16)
    forged = msgspec.structs.replace(offer, ranks=(msgspec.structs.replace(offer.ranks[0], secret=secret),))
    return pair.expect(pair.pull(forged, in_place=_coin(pair)), "stale", "torn")


def revoke_snapshot(pair: FaultPair) -> Outcome:
    """Publish two more versions while this one is read, with another reader on the first: the older one is revoked."""

    def publish_twice() -> None:
        newer = pair.source.publish()
        with closing(Puller(layout_of(pair.tensors, "rollout-1"))) as other:
            again = Trigger(pair.draw.randrange(2, max(3, pair.num_steps)), pair.source.publish)
            try:
                other.pull(newer, pair.plan, deadline_s=ANSWER_S, cancelled=again)
            except WeightsError:
                pass  # it may be the one that is revoked
            again.fire()

    trigger = _trigger(pair, publish_twice)
    outcome = pair.pull(pair.source.publish(), in_place=_coin(pair), cancelled=trigger)
    trigger.fire()
    return outcome


def cancel(pair: FaultPair) -> Outcome:
    """Cancel the pull, at any step."""
    trigger = _trigger(pair, cancels=True)
    return pair.pull(pair.source.publish(), in_place=_coin(pair), cancelled=trigger)


def fill_disk(pair: FaultPair) -> Outcome:
    """Limit the file size of an export, from its beginning or when it is finished; it must leave no trace."""
    offer, layout = encode(pair.source.publish()), encode(pair.source.layout)
    num_bytes = sum(tensor.nbytes for tensor in weights(0).values())
    early = _coin(pair)
    limit = pair.draw.randrange(num_bytes // 2) if early else pair.draw.randrange(64)
    with tempfile.TemporaryDirectory() as made_here:
        folder = Path(made_here)
        path = folder / "checkpoint"
        child: Any = mp.get_context("forkserver").Process(target=_export, args=(path, layout, offer, limit, early))
        child.start()
        child.join(ANSWER_S)
        require(child.exitcode == REFUSED, f"an export on a full disk ended with {child.exitcode}")
        child.close()
        require(not any(folder.iterdir()), "an export that failed has left something behind")
        export(path, layout, offer)
        version = decode_offer(offer).version
        with open_folder(path) as made:
            for name, array in made.arrays().items():
                wanted = weights(version)[name].contiguous().reshape(-1).view(torch.uint8).numpy()
                require(array.tobytes() == wanted.tobytes(), f"{name} was exported with other bits")
            del array
    require(pair.holds(), "an export has changed another destination")
    return "stale"


def export(
    path: Path,
    layout: bytes,
    offer: bytes,
    at_first: Callable[[], None] = do_nothing,
    at_last: Callable[[], None] = do_nothing,
) -> None:
    """Write a version into a checkpoint of several files, with hooks before its beginning and its end."""
    source, offered = decode_layout(layout), decode_offer(offer)
    at_first()
    with create_folder(path, source.tensors, max_file_bytes=256 << 10) as folder:
        wanted = folder.layout("export")
        live = {name: torch.from_numpy(memory) for name, memory in folder.memories.items()}
        with closing(Puller(wanted)) as puller:
            plan = make_plan(source, wanted, bucket_bytes=BUCKET_BYTES)
            puller.pull(offered, plan, deadline_s=ANSWER_S, into=live)
            require(puller.attest(live, offered) == offered.root, "an export is not what was offered")
        at_last()
        folder.finish()


def _export(path: Path, layout: bytes, offer: bytes, limit: int, early: bool) -> None:
    """Export with a limit on file sizes; runs in a child process."""
    torch.set_num_threads(1)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    try:
        export(path, layout, offer, *((fill,) if early else (do_nothing, fill)))
    except WeightsError:
        sys.exit(REFUSED)


FAULTS: Final[dict[Kind, Callable[[FaultPair], Outcome]]] = {
    "source killed": kill_source,
    "source stalled": stall_source,
    "reader killed": kill_reader,
    "wire flipped": flip_wire,
    "snapshot flipped": flip_snapshot,
    "ticket wrong": forge_secret,
    "snapshot revoked": revoke_snapshot,
    "cancelled": cancel,
    "disk full": fill_disk,
}
