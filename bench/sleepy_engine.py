"""An engine that simulates the time of a GPU without using the CPU, for the rollouts of `async.py`.

    [rollout]
    engine = "bench/sleepy_engine.py:SleepyEngine"

Tokens and lengths are drawn from the seed of each group (`asynchronous_device.Profile`, read from `sleepy.json` in the
model's folder). Its weights are real: the tensors of the folder's model, which it pulls, switches and attests like any
engine. Tokens are generated as time passes, independently of calls, as in an engine with its own processes; `wake` is
called when a row has ended.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from asynchronous_device import Device, Profile, Row

from starling.algo.architecture import context_length
from starling.common.errors import ConfigError, WeightsError
from starling.common.wire.messages import Status
from starling.rollout.engine.base import (
    AdoptionReport,
    CacheMode,
    Completion,
    EngineSpec,
    GroupFailed,
    GroupRequest,
    GroupResult,
    PartialCompletion,
    RequestError,
)
from starling.rollout.engine.embedded.model import build_model, live_tensors
from starling.rollout.engine.validation import check_request
from starling.weightsync.offers.offer import Offer, layout_root
from starling.weightsync.plan.layout import Layout
from starling.weightsync.plan.planner import Plan
from starling.weightsync.puller.puller import Puller
from starling.weightsync.puller.report import PullProgress, PullReport
from starling.weightsync.tensors.modules import layout_of

PROFILE: Final = "sleepy.json"
"""The file in the model's folder that holds the fields of `Profile`."""


class SleepyEngine:
    """An `Engine`, see `starling.rollout.engine.base`."""

    def __init__(self, spec: EngineSpec) -> None:
        """Make an engine without work. Raises ConfigError when the model's folder has no profile."""
        if spec.rollout.adoption == "recompute":
            raise ConfigError("rollout.adoption = 'recompute': a sleepy engine has no cache; leave it at 'keep'")
        model = build_model(spec.path, dtype=spec.model.dtype, device="cpu", weights=False)
        self._profile = read_profile(spec.path)
        self._device = Device(self._profile)
        self._stop = spec.eos_token_ids[0] if spec.eos_token_ids else 0
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._max_model_len = spec.max_model_len or context_length(model.config) or 1 << 20
        self._tensors = live_tensors(model)
        self._layout = layout_of(self._tensors, spec.name)
        self._puller = Puller(self._layout, digests=spec.weights.digests, serving=spec.serving)
        self._offer: Offer | None = None
        self._root_plan: Plan | None = None
        self._groups: dict[str, tuple[GroupRequest, dict[int, Row]]] = {}
        """What is held, each with the rows that have ended."""
        self._paused = False
        self._alarm = _Alarm(spec.wake)

    @property
    def num_running(self) -> int:
        """Sequences that grow."""
        return len(self._device.running)

    @property
    def num_waiting(self) -> int:
        """Groups of which no sequence grows yet."""
        growing = {row.lease for row in self._device.running}
        return len({row.lease for row in self._device.waiting} - growing)

    @property
    def num_tokens(self) -> int:
        """Tokens that it has sampled since it was made."""
        return self._device.num_tokens

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence."""
        return self._max_model_len

    @property
    def version(self) -> int:
        """The weight version that samples the next token; -1 before there is one."""
        return self._device.version

    @property
    def ready(self) -> bool:
        """Whether a row has ended by now."""
        return not self._paused and self._device.next_end() <= time.monotonic()

    @property
    def serves(self) -> bool:
        """It can offer its weights to others."""
        return True

    def add(self, request: GroupRequest) -> None:
        """Queue a group. Raises RequestError when it cannot be generated as asked."""
        check_request(request, self._vocab_size, self._max_model_len, self._profile.max_rows)
        if request.lease in self._groups:
            raise RequestError(f"lease {request.lease!r} is held already; give every request a lease of its own")
        rows = [
            Row(request.lease, index, self._profile.length(request.sampling.seed, index, self._most(request)))
            for index in range(request.num_completions)
        ]
        for row, partial in zip(rows, request.partial, strict=False):
            row.done = len(partial.token_ids)
            row.versions = runs_of(partial.versions)
        ended = {row.index: row for row in rows if row.done >= row.length}
        self._groups[request.lease] = (request, ended)
        self._advance()
        self._device.add((row for row in rows if row.index not in ended), time.monotonic())
        self._set_alarm()

    def step(self) -> list[GroupResult | GroupFailed]:
        """Return the groups that have ended."""
        self._advance()
        self._set_alarm()
        whole = [lease for lease, (request, ended) in self._groups.items() if len(ended) == request.num_completions]
        return [self._result(*self._groups.pop(lease)) for lease in whole]

    def cancel(self, lease: str) -> bool:
        """Forget a group; returns whether it was held."""
        return self.interrupt(lease) is not None

    def interrupt(self, lease: str) -> tuple[PartialCompletion, ...] | None:
        """Take a group out and return what is there of it."""
        if lease not in self._groups:
            return None
        self._advance()
        request, ended = self._groups.pop(lease)
        rows = ended | {row.index: row for row in self._device.remove(lease)}
        completions = [self._completion(rows[index], request) for index in sorted(rows)]
        return tuple(
            PartialCompletion(one.token_ids, one.logprobs, one.versions, one.status if index in ended else None)
            for index, one in enumerate(completions)
        )

    def pause(self) -> None:
        """Sample nothing more until `resume`."""
        self._advance()
        self._paused = True
        self._set_alarm()

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._paused:
            self._paused = False
            self._device.hold(time.monotonic())
            self._set_alarm()

    def layout(self) -> Layout:
        """Return the layout of its one worker."""
        return self._layout

    def pull(
        self,
        offer: Offer,
        plan: Plan,
        *,
        root_plan: Plan | None = None,
        deadline_s: float,
        cancelled: Callable[[], bool],
        progress: Callable[[PullProgress], None],
        in_place: bool = False,
        relays: Sequence[Offer] = (),
        announce: Callable[[Offer], None] | None = None,
    ) -> PullReport:
        """Bring a version into staging, or in place. Raises WeightsError when it fails."""
        into = self._tensors if in_place else None
        report = self._puller.pull(
            offer,
            plan,
            deadline_s=deadline_s,
            cancelled=cancelled,
            progress=progress,
            into=into,
            relays=relays,
            relays_first=True,
            announce=announce,
        )
        self._offer, self._root_plan = offer, root_plan
        return report

    def adopt(self, mode: CacheMode) -> AdoptionReport:
        """Put the version that was pulled last in place. Raises WeightsError when there is none."""
        if self._offer is None:
            raise WeightsError("There is no version to adopt: pull first.")
        self._advance()
        version = self._offer.version
        if self._puller.version != version:
            self._puller.switch(self._tensors)
        roots = self._puller.attest_roots(self._tensors, self._offer, self._root_plan)
        self._device.adopt(version)
        self._device.hold(time.monotonic())
        self._set_alarm()
        return AdoptionReport(version, roots.root == self._offer.root, roots.root, layout_root([roots.rank_root]))

    def sleep(self) -> None:
        """Do nothing: the engine uses no device memory."""

    def wake_up(self) -> None:
        """Do nothing: no device memory was released."""

    def tensors(self) -> Mapping[str, Any]:
        """Return the live weights by Hugging Face name."""
        return self._tensors

    def close(self) -> None:
        """End its thread and its connections."""
        self._alarm.close()
        self._puller.close()

    def _advance(self) -> None:
        for row in [] if self._paused else self._device.advance(time.monotonic()):
            self._groups[row.lease][1][row.index] = row

    def _set_alarm(self) -> None:
        self._alarm.set(math.inf if self._paused else self._device.next_end())

    def _most(self, request: GroupRequest) -> int:
        return min(request.sampling.max_tokens, self._max_model_len - len(request.prompt_ids))

    def _result(self, request: GroupRequest, rows: dict[int, Row]) -> GroupResult:
        completions = tuple(self._completion(rows[index], request) for index in range(request.num_completions))
        return GroupResult(request.lease, np.array(request.prompt_ids, np.int32), completions, request.tensors)

    def _completion(self, row: Row, request: GroupRequest) -> Completion:
        """Return what a row has: tokens drawn from its seed, of which a stop token is the last one of a whole row."""
        truncated = row.length == self._most(request)
        drawn = np.random.default_rng((request.sampling.seed, row.index, 1))
        token_ids = drawn.integers(3, self._vocab_size, row.length).astype(np.int32)
        if not truncated:
            token_ids[-1] = self._stop
        versions = np.zeros(row.done, np.int32)
        for version, begin in row.versions:
            versions[begin:] = version
        logprobs = np.full(row.done, -math.log(self._vocab_size), np.float32)
        return Completion(token_ids[: row.done], logprobs, versions, Status.TRUNCATED if truncated else Status.OK)


class _Alarm:
    """A thread that calls `wake` when a moment has come."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._due = math.inf
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="sleepy", daemon=True)
        self._thread.start()

    def set(self, due: float) -> None:
        """Call at `due`, in monotonic seconds, and at no other time that was set before."""
        with self._changed:
            if due != self._due:
                self._due = due
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                left = self._due - time.monotonic()
                if left > 0.0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                self._due = math.inf
            self._wake()


def read_profile(folder: Path) -> Profile:
    """Return the profile in a model's folder. Raises ConfigError when there is none."""
    try:
        return Profile(**json.loads((folder / PROFILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder / PROFILE} is no profile of a device ({error}); bench/async.py writes one"
        ) from None


def runs_of(versions: Any) -> list[tuple[int, int]]:
    """Return where each version begins in an array that has one per token."""
    begins = [index for index in range(len(versions)) if index == 0 or versions[index] != versions[index - 1]]
    return [(int(versions[index]), index) for index in begins]
