"""vLLM as an engine: one thread calls it, another one runs AsyncLLM, and its own processes compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from starling.common.errors import ConfigError, WeightsError
from starling.rollout.engine.base import (
    AdoptionReport,
    CacheMode,
    EngineLostError,
    EngineSpec,
    GroupFailed,
    GroupRequest,
    GroupResult,
    PartialCompletion,
    RequestError,
)
from starling.rollout.engine.multimodal.prompts import patches_per_token, placeholders
from starling.rollout.engine.validation import check_partial, check_request, check_tensors
from starling.rollout.engine.vllm import adapters
from starling.rollout.engine.vllm import launch as start
from starling.rollout.engine.vllm.async_llm import AsyncLlmThread
from starling.rollout.engine.vllm.groups import VllmGroup, check_temperature
from starling.rollout.engine.vllm.pull_progress import await_workers
from starling.weightsync.plan.layout import Layout, encode
from starling.weightsync.plan.offer import Offer, joined_root
from starling.weightsync.plan.planner import Plan
from starling.weightsync.puller.fetch import PullProgress
from starling.weightsync.puller.puller import PullReport

SWITCH_S: Final = 600.0
"""How long workers may take to put a version in place."""


class VllmEngine:
    """An `Engine` (see `base`) over vLLM. `ready` says that something ended: it computes by itself."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start vLLM, with weights at random unless `rollout.load_weights`, or below adapters.

        Raises:
            ConfigError: no vLLM that this was written for, or a setting that it does not take.
            EngineLostError: it did not start.
        """
        start.check_version()
        start.check_spec(spec)
        self._spec = spec
        self._runner = runner = AsyncLlmThread(spec, None if spec.model.lora is None else adapters.read(spec))
        try:
            self._model_config = runner.model_config
            self._layout = runner.call(runner.layout(), spec.rollout.vllm.start_timeout_s)
            self._version = -1
            if spec.rollout.load_weights:
                runner.call(runner.set_version(0))
                self._version = 0
        except BaseException:
            runner.close()
            raise
        self._vocab_size = int(self._model_config.get_vocab_size())
        config = self._model_config.hf_config
        self._placeholders = placeholders(config) if self._model_config.supports_multimodal_inputs else {}
        self._patches_per_token = patches_per_token(config)
        self._groups: dict[str, VllmGroup] = {}
        self._num_added = self._num_pulls = 0
        self._paused = False
        self._staged: Offer | None = None

    @property
    def num_running(self) -> int:
        """Sequences that are being extended."""
        submitted = sum(len(group.unfinished) for group in self._groups.values() if group.submitted)
        return min(submitted, self._spec.rollout.max_rows)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for room."""
        return sum(not group.submitted for group in self._groups.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that it has sampled since it was made."""
        return self._runner.num_tokens

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and completion together."""
        return int(self._model_config.max_model_len)

    @property
    def version(self) -> int:
        """The weight version that samples the next token; -1 before there is one."""
        return self._version

    @property
    def ready(self) -> bool:
        """Whether a group ended, or the engine is lost."""
        return bool(self._runner.ended or self._runner.loss)

    @property
    def serves(self) -> bool:
        """Its weights are in other processes, and stay there."""
        return False

    def add(self, request: GroupRequest) -> None:
        """Queue a group.

        Raises:
            RequestError: the group cannot be generated as asked.
        """
        from starling.rollout.engine.vllm import multimodal as media

        check_request(request, self._vocab_size, self.max_model_len, self._spec.rollout.max_rows)
        check_partial(request, self._vocab_size)
        check_tensors(request, self._placeholders, self._patches_per_token)
        check_temperature(request)
        if request.lease in self._groups:
            raise RequestError(f"lease {request.lease!r} is held already; give every request a lease of its own")
        items = media.items_of(request, self._placeholders, self._patches_per_token)
        group = VllmGroup(self._num_added, request, self.max_model_len, items)
        self._num_added += 1
        self._groups[request.lease] = group
        self._runner.add(group)

    def step(self) -> list[GroupResult | GroupFailed]:
        """Return the groups that ended. Never waits.

        Raises:
            EngineLostError: its processes are gone.
        """
        results = []
        while self._runner.ended:
            group = self._runner.ended.popleft()
            if self._groups.get(group.request.lease) is group:  # else it was cancelled in the meantime
                del self._groups[group.request.lease]
                results.append(group.result())
        if self._runner.loss and not results:
            raise EngineLostError(f"vLLM is lost: {self._runner.loss}")
        return results

    def cancel(self, lease: str) -> bool:
        """Forget a group and free its room at once; returns whether the engine held it."""
        return self.interrupt(lease) is not None

    def interrupt(self, lease: str) -> tuple[PartialCompletion, ...] | None:
        """Take a group out and return what is there of its completions, or None when the engine does not hold it."""
        group = self._groups.pop(lease, None)
        return None if group is None else self._runner.call(self._runner.drop(group))

    def pause(self) -> None:
        """Sample nothing more until `resume`; running sequences stay."""
        if not self._paused:
            self._runner.call(self._runner.pause(clear_cache=False))
            self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._paused:
            self._runner.call(self._runner.resume())
            self._paused = False

    def layout(self) -> Layout:
        """Return which shard of which tensor each worker holds."""
        return self._layout

    def pull(
        self,
        offer: Offer,
        plan: Plan,
        *,
        deadline_s: float,
        cancelled: Callable[[], bool],
        progress: Callable[[PullProgress], None],
        in_place: bool = False,
    ) -> PullReport:
        """Have every worker bring its shards of a version into its staging area; see `base`.

        Raises:
            WeightsError: it failed in one of them.
        """
        runner = self._runner
        self._staged = None
        self._num_pulls += 1
        arguments = (self._num_pulls, encode(offer), encode(plan), deadline_s, in_place)
        try:
            runner.call(runner.ask_workers("starling_pull", *arguments))
            report = await_workers(
                runner.listener,
                self._num_pulls,
                len(self._layout.ranks),
                deadline_s,
                lambda: cancelled() or bool(runner.loss),
                progress,
            )
        except EngineLostError as error:
            raise WeightsError(f"Version {offer.version} was not pulled: {error}") from error
        except WeightsError:
            if not runner.loss and not runner.closed:
                runner.call(runner.ask_workers("starling_cancel"))
            raise
        self._staged = offer
        return report

    def adopt(self, mode: CacheMode) -> AdoptionReport:
        """Put the version that was pulled last in place, between two tokens, and prove what the workers hold.

        Raises:
            WeightsError: nothing is staged; then nothing was touched.
            EngineLostError: a worker is gone.
        """
        offer, self._staged = self._staged, None
        if offer is None:
            raise WeightsError("There is no staged version to adopt: pull one first.")
        adopted = self._runner.call(self._adopt(offer, mode), SWITCH_S)
        self._version = offer.version
        return adopted

    async def _adopt(self, offer: Offer, mode: CacheMode) -> AdoptionReport:
        """Runs in the engine's thread."""
        runner = self._runner
        await runner.pause(clear_cache=mode == "recompute")
        cached = sum(group.num_cached for group in self._groups.values()) if mode == "recompute" else 0
        try:
            roots = await runner.ask_workers("starling_adopt", offer.version)
        except WeightsError as error:  # some may have switched, others not: nothing may be sampled with that
            runner.lose(f"version {offer.version} was not put in place: {error}")
            raise EngineLostError(runner.loss) from error
        await runner.set_version(offer.version)
        if mode == "salt":
            runner.salt = f"version {offer.version}"
            await runner.restart_unbegun()
        if not self._paused:
            await runner.resume()
        root = joined_root(offer, roots)
        return AdoptionReport(version=offer.version, proven=root == offer.root, root=root, recomputed_tokens=cached)

    def sleep(self) -> None:
        """Give the device memory of weights and cache to others until `wake_up`; that of CPUs it keeps.

        Raises:
            ConfigError: vLLM was not started so that it can.
        """
        if not self._model_config.enable_sleep_mode and not self._runner.on_cpu:
            raise ConfigError(
                "vllm gives its memory away only with rollout.vllm.engine_args.enable_sleep_mode = true, which "
                "launch.colocate sets; set it, or launch.colocate = false"
            )
        self._runner.call(self._runner.sleep())

    def wake_up(self) -> None:
        """Take the memory back. The weights are undefined: adopt some."""
        self._runner.call(self._runner.wake_up())
        self._version = -1

    def tensors(self) -> Mapping[str, Any]:
        """Return nothing: the weights are in other processes."""
        return {}

    def close(self) -> None:
        """End vLLM and its processes, within a deadline."""
        self._runner.close()
