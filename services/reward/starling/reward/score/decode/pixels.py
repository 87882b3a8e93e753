"""Pixels of the samples of a task: the memory that they are decoded into, and the samples with them as their media."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from starling.reward.core.media import MediaForm, MediaRow, MediaTensor
from starling.reward.core.samples import Sample, ScoreTask
from starling.reward.score.workers.places import offsets_of
from starling.reward.score.workers.shared import MediaMemory, SharedBuffer


def allocate_pixels(memory: MediaMemory, task: ScoreTask, forms: Mapping[int, MediaForm]) -> dict[int, MediaTensor]:
    """Return memory for the pixels of samples of a task, in one buffer, for which room was reserved with the latents.

    Args:
        memory: for media.
        task: with latents.
        forms: of the pixels, by the indices of their samples in the task.

    Returns:
        Places by the indices of their samples in the task.

    Raises:
        TooManyBuffersError: no further buffer can be had.
    """
    if not forms:
        return {}
    offsets, end = offsets_of(form.size_bytes for form in forms.values())
    latents = task.media[0].buffer
    assert isinstance(latents, SharedBuffer)
    latents.release(sum(form.size_bytes for form in forms.values()))
    buffer = memory.allocate(end)
    return {
        position: MediaTensor(form, 1, buffer, offset)
        for (position, form), offset in zip(forms.items(), offsets, strict=True)
    }


def seal_pixels(pixels: Iterable[MediaTensor]) -> None:
    """Seal the buffer of all these pixels against writes. Raises ValueError."""
    buffer = next(iter(pixels)).buffer
    assert isinstance(buffer, SharedBuffer)
    buffer.seal()


def with_pixels(
    task: ScoreTask, pixels: Mapping[int, MediaTensor], failures: Collection[int]
) -> tuple[tuple[Sample, ...], tuple[MediaTensor, ...]]:
    """Return the samples of a task with their pixels as their media, which are decoded, or came so; and these media."""
    media = {index: tensor for index, tensor in enumerate(task.media) if tensor.form.kind == "pixels"}
    new_index = {index: number for number, index in enumerate(media)}
    tensors, samples = list(media.values()), list[Sample]()
    for position, sample in enumerate(task.samples):
        row = None
        if position in pixels and position not in failures:
            row = MediaRow(len(tensors))
            tensors.append(pixels[position])
        elif sample.media is not None and sample.media.tensor in new_index:
            row = MediaRow(new_index[sample.media.tensor], sample.media.row)
        samples.append(Sample(sample.index, sample.prompt, sample.completion, row))
    return tuple(samples), tuple(tensors)
