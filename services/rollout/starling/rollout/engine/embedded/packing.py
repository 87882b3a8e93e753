"""Packed prefill: sequences as one row of segments, in which the prompt of each group stands once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from starling.algo.attention.forest import Forest
from starling.rollout.engine.embedded.batch import PrefillSequence, last_position

Places = list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
"""Places of sequences in the cache: of the prompt's tokens and of those after it; see `PagedCache.join`."""


class Packing:
    """Sequences as one row of segments: the prompt of each group, followed by what its sequences have after it."""

    def __init__(self, sequences: Sequence[PrefillSequence], places: Places) -> None:
        """Pack `sequences`, whose tokens have `places` in the cache."""
        self.sequences = sequences
        by_group: dict[int, list[int]] = {}
        for number, sequence in enumerate(sequences):
            by_group.setdefault(sequence.group.number, []).append(number)
        lengths, parents, ids, held = list[int](), list[int](), list[int](), list[npt.NDArray[np.int64]]()
        self._ends, self._prompts = [0] * len(sequences), dict[int, int]()
        """Last token of each sequence, and first token of each group's prompt."""

        def append(tokens: list[int], parent: int, places: npt.NDArray[np.int64]) -> None:
            lengths.append(len(tokens))
            parents.append(parent)
            ids.extend(tokens)
            held.append(places)

        for group, numbers in by_group.items():
            root, prompt = len(lengths), sequences[numbers[0]].group.request.prompt_ids
            self._prompts[group] = len(ids)
            append(prompt, -1, places[numbers[0]][0])
            for number in numbers:
                own = sequences[number].ids[len(prompt) :]
                if own:
                    append(own, root, places[number][1])
                self._ends[number] = len(ids) - 1 if own else self._prompts[group] + len(prompt) - 1
        self.forest = Forest(tuple(lengths), tuple(parents))
        self.ids = np.array(ids, np.int64)
        """[tokens]."""
        self.places = np.concatenate(held)
        """[tokens]."""

    @property
    def scored(self) -> list[PrefillSequence]:
        """Sequences whose groups need the log-probabilities of their prompts."""
        return [sequence for sequence in self.sequences if sequence.group.needs_prompt_logprobs]

    def logit_tokens(self) -> npt.NDArray[np.int64]:
        """Return the tokens whose logits are needed: the last of each sequence, then the prompts of `scored`."""
        prompts = [
            self._prompts[one.group.number] + np.arange(len(one.group.request.prompt_ids) - 1) for one in self.scored
        ]
        return np.concatenate([np.array(self._ends, np.int64), *prompts])

    def positions(self) -> npt.NDArray[np.int64]:
        """Return the positions of the tokens: [1, tokens]; with images [3, 1, tokens]."""
        positions: npt.NDArray[np.int64] = self.forest.positions[None]
        if not any(sequence.group.request.tensors for sequence in self.sequences):
            return positions
        positions = np.repeat(positions[None], 3, axis=0)
        for sequence, end in zip(self.sequences, self._ends, strict=True):
            request, begin = sequence.group.request, self._prompts[sequence.group.number]
            if request.tensors:
                num_own = len(sequence.ids) - len(request.prompt_ids)
                positions[:, 0, begin : begin + len(request.prompt_ids)] = request.tensors["position_ids"]
                own = last_position(request) + 1 + np.arange(num_own)
                positions[:, 0, end + 1 - num_own : end + 1] = own
        return positions


def token_spans(sequences: Sequence[PrefillSequence]) -> Iterator[tuple[slice, slice]]:
    """Yield where the prompt of each sequence, and its tokens after that, are in the row of a `Packing`."""
    by_group: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        by_group.setdefault(sequence.group.number, []).append(number)
    found, end = dict[int, tuple[slice, slice]](), 0
    for numbers in by_group.values():
        begin, end = end, end + len(sequences[numbers[0]].group.request.prompt_ids)
        prompt = slice(begin, end)
        for number in numbers:
            begin, end = end, end + len(sequences[number].ids) - (prompt.stop - prompt.start)
            found[number] = prompt, slice(begin, end)
    yield from (found[number] for number in range(len(sequences)))


def num_packed_tokens(sequences: Sequence[PrefillSequence]) -> int:
    """Return the tokens of `sequences`, with the prompt of each group once."""
    prompts = {one.group.number: len(one.group.request.prompt_ids) for one in sequences}
    return sum(prompts.values()) + sum(len(one.ids) - len(one.group.request.prompt_ids) for one in sequences)
