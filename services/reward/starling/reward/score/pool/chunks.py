"""Chunks: calls that are sent to a worker together, with the samples and the media that they need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from starling.reward.core.media import MediaTensor
from starling.reward.core.samples import Sample, ScoreTask
from starling.reward.score.pool.call import Call
from starling.reward.score.workers.protocol import CallChunk, PlacedMedia
from starling.reward.score.workers.shared import SharedBuffer

CHUNK_S: Final = 0.004
"""Expected seconds of work in a chunk; a worker gets another chunk when it has less than this left."""
CHUNK_CALLS: Final = 64
"""Limit on the calls of a chunk. Twice as many reports fit a socket's buffer, so a worker never waits to report."""


class Chunk(NamedTuple):
    """A message to a worker, and the buffers whose descriptors go with it."""

    message: CallChunk
    buffers: tuple[SharedBuffer, ...]


def next_calls(queue: deque[Call], expected_s: Callable[[Call], float]) -> list[Call]:
    """Take the next calls of one task from a queue, as many as fit a chunk.

    Args:
        queue: calls, of which those of cancelled tasks are dropped.
        expected_s: returns the expected seconds of a call.
    """
    calls: list[Call] = []
    total_s = 0.0
    while queue and len(calls) < CHUNK_CALLS:
        call = queue[0]
        if call.state.is_cancelled:
            queue.popleft()
            continue
        total_s += expected_s(call)
        if calls and (call.state is not calls[0].state or total_s > CHUNK_S):
            break
        calls.append(queue.popleft())
    return calls


def chunk_of(calls: Sequence[Call], first_serial: int, *, reads_media: bool) -> Chunk:
    """Return the chunk of calls of one task.

    Args:
        calls: in the order in which they are to be made.
        first_serial: serial number of the first call; the others have the next ones.
        reads_media: whether a scorer of them reads media.
    """
    task, places, numbered = calls[0].state.task, dict[int, int](), []
    for serial, call in enumerate(calls, first_serial):
        indices = tuple([places.setdefault(position, len(places)) for position in call.positions])
        numbered.append((serial, call.scorer, indices))
    sent = [task.samples[position] for position in places]
    prompts: dict[int, int] = {}
    samples = tuple([(prompts.setdefault(one.prompt, len(prompts)), one.completion) for one in sent])
    buffers: dict[SharedBuffer, int] = {}
    media = tuple([_input(task, sample, buffers) for sample in sent]) if task.media and reads_media else ()
    outputs = tuple([_output(task.outputs[position], buffers) for position in places]) if task.outputs else ()
    sent_prompts = tuple([task.prompts[one] for one in prompts])
    message = CallChunk(sent_prompts, samples, tuple(numbered), media, outputs, len(buffers))
    return Chunk(message, tuple(buffers))


def _input(task: ScoreTask, sample: Sample, buffers: dict[SharedBuffer, int]) -> PlacedMedia | None:
    """Return where the media of a sample are, and number their buffer; None without media."""
    if sample.media is None:
        return None
    tensor = task.media[sample.media.tensor]
    return PlacedMedia(_number_of(tensor, buffers), tensor.offset_of(sample.media.row), tensor.form)


def _output(tensor: MediaTensor, buffers: dict[SharedBuffer, int]) -> PlacedMedia:
    """Return where the pixels of a sample are to be written, and number their buffer."""
    return PlacedMedia(_number_of(tensor, buffers), tensor.offset, tensor.form)


def _number_of(tensor: MediaTensor, buffers: dict[SharedBuffer, int]) -> int:
    assert isinstance(tensor.buffer, SharedBuffer)
    return buffers.setdefault(tensor.buffer, len(buffers))
