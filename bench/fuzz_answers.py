"""Answers of replicas around a fuzzed controller: the true ones, and false ones that keep to every form."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from starling.common.wire import messages as wire
from starling.common.wire.tensors import KEPT_COUNTS, KEPT_IDS, TEACHER_TENSORS

Array = npt.NDArray[Any]
Answer = tuple[wire.Up, tuple[bytes, ...]]

TOKENS = 3
"""Length of a completion, unless its group is resumed from more, or may have fewer."""
UNREADABLE_TEXT, UNREADABLE_TOKEN = "unreadable", 999
"""What no scorer, and no teacher, can score: the second one has a smaller vocabulary than the policy."""
TEXTS = {UNREADABLE_TOKEN: UNREADABLE_TEXT, 998: "x"}
"""Texts of completions that begin with these tokens, by token; all others are different."""
SCORER_FAILURES = 0.02
"""Share of the groups that an honest reward replica or teacher fails to score."""


def _metas(arrays: Sequence[Array], names: Sequence[str]) -> tuple[wire.TensorMeta, ...]:
    return tuple(
        wire.TensorMeta(dtype=array.dtype.name, shape=array.shape, nbytes=array.nbytes, name=name)
        for array, name in zip(arrays, names, strict=True)
    )


class Completions:
    """Tokens of a group: those that it is resumed from, and further ones of `version`."""

    def __init__(self, command: wire.GenerateGroup, buffers: Sequence[bytes], version: int, num_tokens: int) -> None:
        self._is_recorded = is_recorded(command)
        self.before = command.partial or (wire.PartialCompletionMeta(num_tokens=0),) * command.num_completions
        wanted = min(command.sampling.max_tokens, num_tokens)
        self.lengths = [one.num_tokens if one.status else max(one.num_tokens, wanted) for one in self.before]
        self._ends = np.cumsum(self.lengths)[:-1]
        ends = np.cumsum([one.num_tokens for one in self.before])[:-1]
        past = buffers[:3] if command.partial else (b"",) * 3
        self._arrays: list[Array] = []
        for (kind, value), encoded in zip(((np.int32, 0), (np.float32, -1), (np.int32, version)), past, strict=True):
            parts = zip(np.split(np.frombuffer(encoded, kind), ends), self.lengths, strict=True)
            longer = [np.pad(part, (0, length - len(part)), constant_values=value) for part, length in parts]
            self._arrays.append(np.concatenate(longer))

    @property
    def ids(self) -> list[Array]:
        """Tokens, by completion."""
        return np.split(self._arrays[0], self._ends)

    @property
    def versions(self) -> list[Array]:
        """Version of each token, by completion."""
        return np.split(self._arrays[2], self._ends)

    def tensors(self) -> tuple[tuple[wire.TensorMeta, ...], tuple[bytes, ...]]:
        """Return tokens, log-probabilities and versions; if they are recorded, each token as the only one kept."""
        arrays, names = [*self._arrays], ["", "", ""]
        if self._is_recorded:
            arrays += [np.ones(sum(self.lengths), np.int32), self._arrays[0]]
            names += [KEPT_COUNTS, KEPT_IDS]
        return _metas(arrays, names), tuple(array.tobytes() for array in arrays)


def is_recorded(command: wire.GenerateGroup) -> bool:
    """Say whether the tokens that truncation keeps are recorded."""
    return command.purpose == "train" and command.sampling.logprobs == "truncated"


def generated(command: wire.GenerateGroup, buffers: Sequence[bytes], version: int) -> Answer:
    """Return the completions of a group."""
    completions = Completions(command, buffers, version, TOKENS)
    trajectories = tuple(
        wire.TrajectoryMeta(
            status=before.status or wire.Status.OK,
            num_tokens=len(versions),
            text=TEXTS.get(int(ids[0]), f"{command.lease} {index}"),
            oldest_version=int(versions.min(initial=1 << 30)),
            newest_version=int(versions.max(initial=-1)),
        )
        for index, (before, ids, versions) in enumerate(
            zip(completions.before, completions.ids, completions.versions, strict=True)
        )
    )
    tensors, sent = completions.tensors()
    prompt = wire.TensorMeta(dtype="int32", shape=(1,), nbytes=4)
    message = wire.GroupGenerated(lease=command.lease, trajectories=trajectories, tensors=(prompt, *tensors),
                                  temperature=command.sampling.temperature)  # fmt: skip
    return message, (bytes(4), *sent)


def interrupted(command: wire.GenerateGroup, buffers: Sequence[bytes], version: int, num_tokens: int) -> Answer:
    """Return the completions of a group as far as `num_tokens` each, or as far as they were."""
    completions = Completions(command, buffers, version, num_tokens)
    partial = tuple(
        replace(before, num_tokens=length)
        for before, length in zip(completions.before, completions.lengths, strict=True)
    )
    tensors, sent = completions.tensors()
    message = wire.GroupInterrupted(lease=command.lease, reason="it leaves", partial=partial, tensors=tensors,
                                    temperature=command.sampling.temperature)  # fmt: skip
    return (message, sent) if any(completions.lengths) else (replace(message, partial=(), tensors=()), ())


def scored(command: wire.ScoreGroup, rng: random.Random) -> Answer:
    """Return the rewards of a group: those of equal texts are equal."""
    texts = [one.text for one in command.completions]
    failed = UNREADABLE_TEXT in texts or rng.random() < SCORER_FAILURES
    status = wire.Status.REWARD_ERROR if failed else wire.Status.OK
    rewards = tuple(None if failed else float(len(set(texts)) > 1 and index % 2) for index in range(len(texts)))
    return wire.GroupScored(lease=command.lease, rewards=rewards, statuses=(status,) * len(texts)), ()


def taught(command: wire.ScoreTokens, buffers: Sequence[bytes], top_k: int, rng: random.Random) -> Answer:
    """Return a teacher's log-probabilities of a group."""
    if UNREADABLE_TOKEN in np.frombuffer(buffers[-1], np.int32) or rng.random() < SCORER_FAILURES:
        reason, status = "the teacher cannot read it", wire.Status.INFRA_LOST
        return wire.LeaseFailed(lease=command.lease, status=status, reason=reason, fatal=True), ()
    num = sum(command.lengths)
    arrays = [np.zeros((num, top_k)[: form.num_dims], form.dtype) for form in TEACHER_TENSORS.values()]
    metas = _metas(arrays, list(TEACHER_TENSORS))
    return wire.TokensScored(lease=command.lease, tensors=metas), tuple(array.tobytes() for array in arrays)


def plausible(answer: Answer, command: wire.LeasedCommand, given: Sequence[bytes], rng: random.Random) -> Answer:
    """Return a false answer that keeps to every form: it can be refused only by what else is known, or not at all."""
    message, buffers = answer
    match message, command:
        case wire.GroupGenerated(), wire.GenerateGroup():
            if rng.random() < 0.5:
                return _given_back(command, given, message.trajectories[0].newest_version, rng)
            return rng.choice(_OF_COMPLETIONS)(message, buffers, rng)
        case wire.GroupScored(rewards=rewards), _:
            same, status = rng.choice((0.0, 1.0, -3.0)), (wire.Status.OK,) * len(rewards)
            return replace(message, rewards=(same,) * len(rewards), statuses=status), ()
        case wire.TokensScored(lease=lease), _:
            return wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason="no memory", fatal=True), ()
    return message, buffers


def _equal_texts(message: wire.GroupGenerated, buffers: tuple[bytes, ...], rng: random.Random) -> Answer:
    text = rng.choice(("x", UNREADABLE_TEXT))
    return replace(message, trajectories=tuple(replace(one, text=text) for one in message.trajectories)), buffers


def _unreadable_tokens(message: wire.GroupGenerated, buffers: tuple[bytes, ...], rng: random.Random) -> Answer:
    ids = np.full(len(buffers[1]) // 4, UNREADABLE_TOKEN, np.int32).tobytes()
    return message, tuple(ids if index in (1, 5) else buffer for index, buffer in enumerate(buffers))


def _other_kept(message: wire.GroupGenerated, buffers: tuple[bytes, ...], rng: random.Random) -> Answer:
    """Change the kept tokens, or add some where none are recorded."""
    num, per_token = len(buffers[1]) // 4, rng.choice((0, 1, 2, 2, 200))
    counts, ids = np.full(num, per_token, np.int32), np.tile(np.arange(per_token, dtype=np.int32), num)
    if rng.random() < 0.3:
        (counts if rng.random() < 0.5 else ids)[: rng.randint(0, 2)] = rng.choice((-1, 1 << 30, 7))
    kept = _metas((counts, ids), (KEPT_COUNTS, KEPT_IDS))[: rng.choice((0, 1, 2, 2, 2, 2))]
    sent = (counts.tobytes(), ids.tobytes())[: len(kept)]
    return replace(message, tensors=(*message.tensors[:4], *kept)), (*buffers[:4], *sent)


_OF_COMPLETIONS: Sequence[Callable[[wire.GroupGenerated, tuple[bytes, ...], random.Random], Answer]] = (
    _equal_texts,
    _equal_texts,
    _unreadable_tokens,
    _other_kept,
)


def _given_back(command: wire.GenerateGroup, given: Sequence[bytes], version: int, rng: random.Random) -> Answer:
    """Give a group back with partial completions, some of which have ended, or are longer than allowed."""
    if rng.random() < 0.3:
        return _ended(command, given, version, rng)
    longer = replace(command, sampling=replace(command.sampling, max_tokens=rng.choice((1, 2, 3, 4, 64, 70))))
    message, buffers = interrupted(longer, given, version, rng.choice((0, 1, 2, 3, 4, 70)))
    assert isinstance(message, wire.GroupInterrupted)
    statuses = (None, None, wire.Status.OK, wire.Status.TRUNCATED)
    partial = tuple(replace(one, status=rng.choice(statuses)) for one in message.partial)
    if rng.random() < 0.1:
        buffers = _of_one_token(partial, buffers, UNREADABLE_TOKEN)
    temperature = rng.choice((message.temperature, message.temperature, -1.0, 0.0, 0.8, 1.0))
    return replace(message, partial=partial, temperature=temperature, lost=rng.random() < 0.1), buffers


def _ended(command: wire.GenerateGroup, given: Sequence[bytes], version: int, rng: random.Random) -> Answer:
    """Give a group back whose completions have all ended, or all but one, and are of no use to the next rollout."""
    message, buffers = interrupted(command, given, version, TOKENS)
    assert isinstance(message, wire.GroupInterrupted)
    first, *others = message.partial
    first = replace(first, status=rng.choice((wire.Status.OK, None)))
    partial = (first, *[replace(one, status=wire.Status.OK) for one in others])
    return replace(message, partial=partial), _of_one_token(partial, buffers, rng.choice(list(TEXTS)))


def _of_one_token(
    partial: Sequence[wire.PartialCompletionMeta], buffers: tuple[bytes, ...], token: int
) -> tuple[bytes, ...]:
    """Return the tensors of partial completions that consist of one token, again and again."""
    ids = np.full(sum(one.num_tokens for one in partial), token, np.int32).tobytes()
    return tuple(ids if index in (0, 4) else buffer for index, buffer in enumerate(buffers))
