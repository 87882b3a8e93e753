"""Diffusion engine: denoising trajectories of a transformer of diffusers, batched over groups, one step at a time.

A completion is a trajectory. Its tokens are the steps that add noise, its log-probabilities their densities, and each
has the version that computed it, so that weights can be adopted between two steps and everything that holds for tokens
holds for them: the bound on staleness, corrections for off-policy steps, and the losses. Trajectories of several groups
advance together, whatever step each of them is at. Their states leave the device as they are recorded.

Groups with temperature 1 are drawn with the sampler, those with temperature 0, as of evaluations, follow the
probability flow through the same noise levels: one pass of the model computes the velocities of both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from starling.algo.denoising import conditions_problem
from starling.algo.diffusion.conditions import Conditions, conditions_of, joined
from starling.algo.diffusion.flow import guided
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.sampler import STORED, Sampler, without_noise
from starling.common.errors import ConfigError
from starling.rollout.engine.base import (
    AdoptionReport,
    CacheMode,
    GroupFailed,
    GroupRequest,
    GroupResult,
    PartialCompletion,
    RequestError,
)
from starling.rollout.engine.diffusion.noise import INITIAL, normal
from starling.rollout.engine.diffusion.rows import DiffusionGroup, RunningTrajectory, sampling_problem
from starling.rollout.engine.weights import LiveWeights
from starling.weightsync.tensors.adapters import published_tensors
from starling.weightsync.tensors.modules import layout_of

if TYPE_CHECKING:
    from starling.weightsync.memory.digests import DigestMode
    from starling.weightsync.offers.offer import Offer
    from starling.weightsync.plan.layout import Layout
    from starling.weightsync.plan.planner import Plan
    from starling.weightsync.puller.report import PullProgress, PullReport
    from starling.weightsync.transports.endpoints import ServingOptions


class DiffusionEngine:
    """An `Engine` (see `base`) over a diffusion transformer."""

    serves = True

    def __init__(
        self,
        model: torch.nn.Module,
        sampler: Sampler,
        shape: Sequence[int],
        *,
        text_length: int,
        max_rows: int = 16,
        exclusive: bool = False,
        guidance: float = 0.0,
        unconditional: Conditions | None = None,
        same_start: bool = False,
        version: int = 0,
        name: str = "rollout-0",
        base: str = "",
        digests: DigestMode = "full",
        serving: ServingOptions | None = None,
    ) -> None:
        """Create an engine without groups.

        Args:
            model: one of `starling.algo.diffusion.models`, in eval mode, without gradients.
            sampler: draws the trajectories.
            shape: of the latents that are generated, [C, H, W] or [C, T, H, W].
            text_length: tokens of a prompt that the model was trained with; shorter ones are padded.
            max_rows: most trajectories that run at a time; a group waits until all its trajectories fit.
            exclusive: generate each group in a batch of its own.
            guidance: scale of classifier-free guidance; 0 for none, and one pass of the model for each step.
            unconditional: the conditions of the other pass, with a batch axis of 1, padded alike.
            same_start: all trajectories of a group begin with the same noise.
            version: the version of the weights in place.
            name: the replica's name, for its layout.
            base: digest of the weights below adapters, from `base_digest`.
            digests: how pulled versions are verified.
            serving: how versions that are pulled are served to others.

        Raises:
            ConfigError: a setting is invalid.
        """
        if max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}; give at least 1")
        if guidance and unconditional is None:
            raise ConfigError(f"guidance is {guidance:g}, and there are no embeddings of an empty prompt: give them")
        self._model, self._sampler, self._shape = model, sampler, tuple(shape)
        self._flow = without_noise(sampler)
        self._device = next(model.parameters()).device
        self._max_rows, self._guidance, self._same_start = max_rows, guidance, same_start
        self._text_length, self._exclusive = text_length, exclusive
        self._unconditional = unconditional
        self._version = version
        self._waiting: OrderedDict[str, DiffusionGroup] = OrderedDict()
        self._running: dict[str, DiffusionGroup] = {}
        self._rows: list[RunningTrajectory] = []
        self._num_steps = 0
        self._paused = False
        self._weights = LiveWeights(
            layout_of(self.tensors(), name, base=base), self.tensors, digests=digests, serving=serving
        )

    @property
    def num_running(self) -> int:
        """Trajectories that the next `step` advances."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for free rows."""
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Steps of trajectories since the engine was created."""
        return self._num_steps

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and the actions of a trajectory."""
        return self._sampler.num_steps + 1

    @property
    def version(self) -> int:
        """The weight version that computes the next step."""
        return self._version

    @property
    def ready(self) -> bool:
        """Whether `step` has something to compute."""
        return not self._paused and bool(self._rows or self._waiting)

    # --- groups ----------------------------------------------------------------------------------------------------

    def add(self, request: GroupRequest) -> None:
        """Queue a group; its tensors are the embeddings of its prompt.

        Raises:
            RequestError: the group cannot be generated.
        """
        self._check(request)
        sampler = self._sampler if request.sampling.temperature else self._flow
        group = DiffusionGroup(request, conditions_of(request.tensors, self._text_length, self._device), sampler)
        self._waiting[request.lease] = group

    def _check(self, request: GroupRequest) -> None:
        lease = request.lease
        if lease in self._waiting or lease in self._running:
            raise RequestError(f"lease {lease!r} is held already; give every request a lease of its own")
        if not 1 <= request.num_completions <= self._max_rows:
            raise RequestError(
                f"{lease}: num_completions is {request.num_completions}; give 1 to {self._max_rows}, or raise max_rows"
            )
        if request.partial or request.score_prompt:
            raise RequestError(f"{lease}: a trajectory cannot be resumed, and its prompt not be scored; leave them out")
        if problem := sampling_problem(request.sampling):
            raise RequestError(f"{lease}: {problem}")
        if problem := conditions_problem(request.tensors, self._text_length):
            raise RequestError(f"{lease}: {problem}")

    def cancel(self, lease: str) -> bool:
        """Drop a group and free its rows at once; return whether the engine held it."""
        return self.interrupt(lease) is not None

    def interrupt(self, lease: str) -> tuple[PartialCompletion, ...] | None:
        """Remove a group, whose trajectories begin anew elsewhere; None if the engine does not hold it."""
        if self._waiting.pop(lease, None) is not None:
            return ()
        if self._running.pop(lease, None) is None:
            return None
        self._rows = [row for row in self._rows if row.group.request.lease != lease]
        return ()

    def pause(self) -> None:
        """Stop sampling until `resume`; running trajectories stay."""
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False

    @torch.inference_mode()
    def step(self) -> list[GroupResult | GroupFailed]:
        """Start waiting groups that fit, advance every trajectory by one step, and return the groups that ended."""
        if self._paused:
            return []
        self._start_waiting()
        if not self._rows:
            return []
        numbers = torch.tensor([row.step for row in self._rows], device=self._device)
        state = torch.stack([row.state for row in self._rows])
        noise = torch.stack([self._noise(row) for row in self._rows]).to(self._device)
        try:
            following, logprobs = self._advance(state, self._velocity(state, numbers), numbers, noise)
        except ValueError as error:
            return self._fail_all(f"the model cannot read its prompt: {error}")
        self._num_steps += len(self._rows)
        broken = ~following.isfinite().flatten(1).all(dim=1)
        # A single copy waits for the device once.
        found = torch.stack([logprobs.double(), broken.double()]).cpu().tolist()
        for row, new, logprob in zip(self._rows, following, found[0], strict=True):
            self._record(row, new, logprob)
        failed = {row.group.request.lease for row, is_broken in zip(self._rows, found[1], strict=True) if is_broken}
        return [*self._fail(failed), *self._finish()]

    def _start_waiting(self) -> None:
        while self._waiting:
            lease, group = next(iter(self._waiting.items()))
            request = group.request
            if len(self._rows) + request.num_completions > self._max_rows or not self._mixes(group):
                return
            del self._waiting[lease]
            self._running[lease] = group
            for index in range(request.num_completions):
                start = 0 if self._same_start else index
                noise = normal(request.sampling.seed, start, INITIAL, self._shape)
                self._rows.append(
                    RunningTrajectory(group, index, noise.to(STORED[self._sampler.stored]).to(self._device))
                )

    def _mixes(self, group: DiffusionGroup) -> bool:
        """Return whether the group can be computed with those that run: their conditions have to be of one shape.

        Those that no model reads are of another one, and fail alone.
        """
        if not self._rows:
            return True
        return not self._exclusive and group.conditions.shapes == self._rows[0].group.conditions.shapes

    def _noise(self, row: RunningTrajectory) -> Tensor:
        if row.group.sampler.levels[row.step] == 0.0:
            return torch.zeros(self._shape)
        return normal(row.group.request.sampling.seed, row.index, row.step, self._shape)

    def _velocity(self, state: Tensor, numbers: Tensor) -> Tensor:
        sigma, conditions = self._sampler.sigma(numbers), joined([row.group.conditions for row in self._rows])
        found = velocity(self._model, state, sigma, conditions)
        if not self._guidance:
            return found
        assert self._unconditional is not None
        empty = self._unconditional.rows([0] * len(self._rows))
        given = replace(empty, frames=conditions.frames)
        return guided(found, velocity(self._model, state, sigma, given), self._guidance)

    def _advance(self, state: Tensor, speed: Tensor, numbers: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next states and their log-densities, each by the sampler of its group."""
        following, logprobs = torch.empty_like(state), torch.zeros(len(state), device=self._device)
        for sampler in (self._sampler, self._flow):
            rows = [index for index, row in enumerate(self._rows) if row.group.sampler is sampler]
            if rows:
                mine = torch.tensor(rows, device=self._device)
                following[mine], logprobs[mine] = sampler.advance(state[mine], speed[mine], numbers[mine], noise[mine])
        return following, logprobs

    def _record(self, row: RunningTrajectory, following: Tensor, logprob: float) -> None:
        """Record a step of a trajectory, whose next state is `following`."""
        sampler = row.group.sampler
        actions = sampler.actions
        if row.step in actions:
            if row.step == actions.start:
                row.states.append(row.state.cpu())
            row.states.append(following.cpu())
        if row.step in sampler.recorded:
            row.logprobs.append(logprob)
            row.versions.append(self._version)
        row.state, row.step = following, row.step + 1

    def _finish(self) -> list[GroupResult]:
        """Remove the trajectories that have ended; return the groups whose trajectories have all ended."""
        ended = [row for row in self._rows if row.step == self._sampler.num_steps]
        if not ended:
            return []
        self._rows = [row for row in self._rows if row.step < self._sampler.num_steps]
        results = []
        for row in ended:
            row.group.done[row.index] = row
            if len(row.group.done) == row.group.request.num_completions:
                del self._running[row.group.request.lease]
                results.append(row.group.result())
        return results

    def _fail(self, leases: set[str]) -> list[GroupFailed]:
        reason = f"the model's velocities are not finite at weight version {self._version}; check the weights"
        for lease in leases:
            self.interrupt(lease)
        return [GroupFailed(lease, reason) for lease in sorted(leases)]

    def _fail_all(self, reason: str) -> list[GroupResult | GroupFailed]:
        leases = sorted(self._running)
        for lease in leases:
            self.interrupt(lease)
        return [GroupFailed(lease, reason) for lease in leases]

    # --- weights ---------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Return the layout of this process, the only worker."""
        return self._weights.layout

    def tensors(self) -> Mapping[str, Any]:
        """Return the live weights by name, those of the adapters if it has any: diffusers' modules have the names of
        its files."""
        saved = self._model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self._model.named_buffers() if name in saved}
        return published_tensors(self._model, {**dict(self._model.named_parameters()), **buffers})

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
        """Pull a version into staging buffers, or into the live weights; see `Engine.pull`."""
        return self._weights.pull(
            offer,
            plan,
            root_plan=root_plan,
            deadline_s=deadline_s,
            cancelled=cancelled,
            progress=progress,
            in_place=in_place,
            relays=relays,
            announce=announce,
        )

    def adopt(self, mode: CacheMode) -> AdoptionReport:
        """Switch to the version that was pulled last, between two steps, and verify its digests; there is no cache.

        Raises:
            WeightsError: nothing is staged.
        """
        offer = self._weights.switch()
        self._version = offer.version
        root, layout_root = self._weights.attest(offer)
        return AdoptionReport(offer.version, root == offer.root, root, layout_root)

    # --- the device ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Move the weights to host memory; all groups must have been removed before."""
        assert not self._rows, "groups are interrupted before the engine sleeps"
        if self._device.type == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Move the weights back, unchanged."""
        self._model.to(self._device)

    def close(self) -> None:
        """Stop the threads and connections of pulls."""
        self._weights.close()
