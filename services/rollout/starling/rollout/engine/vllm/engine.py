"""vLLM as an engine: one thread owns it, another one runs AsyncLLM, and vLLM's processes compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from starling.algo.architecture import media_inputs
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
from starling.rollout.engine.validation import check_partial, check_request, check_routing, check_tensors
from starling.rollout.engine.vllm import adapters, launch
from starling.rollout.engine.vllm.async_llm import AsyncLlmThread
from starling.rollout.engine.vllm.groups import VllmGroup, check_temperature, num_logprobs
from starling.rollout.engine.vllm.pull_progress import await_workers
from starling.rollout.engine.vllm.statistics import EngineLoad
from starling.weightsync.offers.offer import Offer, joined_root, layout_root
from starling.weightsync.plan.layout import Layout, encode
from starling.weightsync.plan.planner import Plan
from starling.weightsync.puller.report import PullProgress, PullReport

ADOPT_TIMEOUT_S: Final = 600.0
"""How long workers may take to switch to a version."""


class VllmEngine:
    """An `Engine` (see `base`) over vLLM. It computes in its own processes; `ready` means that a group has ended."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start vLLM; with random weights, unless `rollout.load_weights` is set or the run trains adapters.

        Raises:
            ConfigError: no supported vLLM is installed, or vLLM does not support a setting.
            EngineLostError: vLLM did not start.
        """
        launch.check_version()
        launch.check_spec(spec)
        self._spec = spec
        self._llm_thread = thread = AsyncLlmThread(spec, None if spec.model.lora is None else adapters.read(spec))
        try:
            self._model_config = thread.model_config
            if spec.has_own_weights and spec.model.lora is None:
                thread.call(thread.prepare())
                self._layout = Layout(replica=spec.name, tensors=(), ranks=())
            else:
                self._layout = thread.call(thread.layout(), spec.rollout.vllm.start_timeout_s)
            self._version = -1
            if spec.rollout.load_weights:
                thread.call(thread.set_version(0))
                self._version = 0
        except BaseException as error:  # raised again; no process of the engine may be left behind
            thread.close(str(error) if isinstance(error, ConfigError) else "")
            raise
        self._vocab_size = int(self._model_config.get_vocab_size())
        config = self._model_config.hf_config
        self._media_inputs = media_inputs(config) if self._model_config.supports_multimodal_inputs else None
        self._groups: dict[str, VllmGroup] = {}
        self._num_added = self._num_pulls = 0
        self._paused = False
        self._staged: Offer | None = None

    @property
    def num_running(self) -> int:
        """Sequences that are being decoded."""
        submitted = sum(len(group.unfinished) for group in self._groups.values() if group.submitted)
        return min(submitted, self._spec.rollout.max_rows)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for free rows."""
        return sum(not group.submitted for group in self._groups.values())

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the engine was created."""
        return self._llm_thread.num_tokens

    @property
    def kv_cache_ratio(self) -> float:
        """Share of the blocks of the KV cache that are in use."""
        return self._llm_thread.load.kv_cache_ratio

    @property
    def scheduler_load(self) -> EngineLoad:
        """What vLLM's scheduler has in hand."""
        return self._llm_thread.load

    @property
    def prefix_cache_tokens(self) -> tuple[int, int]:
        """Prompt tokens that were looked up in the prefix cache since the engine was created, and those found."""
        statistics = self._llm_thread.statistics
        return statistics.num_queried_tokens, statistics.num_hit_tokens

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one sequence, prompt and completion together."""
        return int(self._model_config.max_model_len)

    @property
    def version(self) -> int:
        """The weight version that samples the next token; -1 before the first adoption if no weights were loaded."""
        return self._version

    @property
    def ready(self) -> bool:
        """Whether a group has ended, or the engine is lost."""
        return bool(self._llm_thread.ended or self._llm_thread.lost_reason)

    @property
    def serves(self) -> bool:
        """False: its weights are in other processes."""
        return False

    def add(self, request: GroupRequest) -> None:
        """Queue a group.

        Raises:
            RequestError: the group cannot be generated as asked.
        """
        from starling.rollout.engine.vllm import multimodal

        check_request(request, self._vocab_size, self.max_model_len, self._spec.rollout.max_rows)
        check_partial(request, self._vocab_size, self._media_inputs)
        check_tensors(request, self._media_inputs)
        check_temperature(request)
        if request.lease in self._groups:
            raise RequestError(f"lease {request.lease!r} is held already; give every request a lease of its own")
        items = multimodal.items_of(request, self._media_inputs)
        wanted = num_logprobs(request, speculative=bool(self._spec.rollout.vllm.speculative))
        self._check_routing(request)
        group = VllmGroup(self._num_added, request, self.max_model_len, items, num_logprobs=wanted)
        self._num_added += 1
        self._groups[request.lease] = group
        self._llm_thread.add(group)

    def _check_routing(self, request: GroupRequest) -> None:
        """Raise a `RequestError` if the experts of the group's tokens cannot be recorded."""
        if request.sampling.routing == "own":
            return
        if not self._spec.rollout.vllm.enforce_eager:
            raise RequestError(
                f"{request.lease}: routing is 'replayed', and the experts of tokens that CUDA graphs compute are not "
                "recorded; set rollout.vllm.enforce_eager = true"
            )
        sizes = None
        if self._model_config.get_num_experts() > 0:
            try:
                sizes = self._llm_thread.call(self._llm_thread.record_experts())
            except WeightsError as error:
                raise RequestError(
                    f"{request.lease}: routing is 'replayed', and vLLM cannot record it ({error}); set "
                    "sampling.routing = 'own', or rollout.engine = 'transformers'"
                ) from error
        check_routing(request, sizes)

    def step(self) -> list[GroupResult | GroupFailed]:
        """Return the groups that have ended. Never blocks.

        Raises:
            EngineLostError: vLLM's processes have died.
        """
        results = []
        while self._llm_thread.ended:
            group = self._llm_thread.ended.popleft()
            if self._groups.get(group.request.lease) is group:  # else it was cancelled in the meantime
                del self._groups[group.request.lease]
                results.append(group.result())
        if self._llm_thread.lost_reason and not results:
            raise EngineLostError(f"vLLM is lost: {self._llm_thread.lost_reason}")
        return results

    def cancel(self, lease: str) -> bool:
        """Drop a group and free its rows at once; return whether the engine held it."""
        return self.interrupt(lease) is not None

    def interrupt(self, lease: str) -> tuple[PartialCompletion, ...] | None:
        """Remove a group and return its partial completions, or None if the engine does not hold it."""
        group = self._groups.pop(lease, None)
        return None if group is None else self._llm_thread.call(self._llm_thread.remove(group))

    def pause(self) -> None:
        """Stop sampling until `resume`; running sequences stay."""
        if not self._paused:
            self._llm_thread.call(self._llm_thread.pause(clear_cache=False))
            self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._paused:
            self._llm_thread.call(self._llm_thread.resume())
            self._paused = False

    def layout(self) -> Layout:
        """Return the weights' layout, with one rank per worker; empty if the engine has the run's only weights."""
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
        """Make every worker pull its shards of a version into its staging buffers; see `Engine.pull`.

        Raises:
            WeightsError: the pull failed in one of them.
        """
        thread = self._llm_thread
        self._staged = None
        self._num_pulls += 1
        encoded_root_plan = b"" if root_plan is None else encode(root_plan)
        arguments = (
            *(self._num_pulls, thread.encoded(offer), encode(plan), encoded_root_plan, deadline_s, in_place),
            *([thread.encoded(relay) for relay in relays], announce is not None),
        )
        try:
            thread.call(thread.call_workers("starling_pull", *arguments))
            report = await_workers(
                thread.pull_messages,
                self._num_pulls,
                len(self._layout.ranks),
                deadline_s,
                lambda: cancelled() or bool(thread.lost_reason),
                progress,
                announce,
            )
        except EngineLostError as error:
            raise WeightsError(f"Version {offer.version} was not pulled: {error}") from error
        except WeightsError:
            if not thread.lost_reason and not thread.closed:
                thread.call(thread.call_workers("starling_cancel"))
            raise
        self._staged = offer
        return report

    def adopt(self, mode: CacheMode) -> AdoptionReport:
        """Switch to the version that was pulled last, between two tokens, and verify the digests of what workers hold.

        Raises:
            WeightsError: nothing is staged; the engine is unchanged.
            EngineLostError: a worker has died.
        """
        offer, self._staged = self._staged, None
        if offer is None:
            raise WeightsError("There is no staged version to adopt: pull one first.")
        adopted = self._llm_thread.call(self._adopt(offer, mode), ADOPT_TIMEOUT_S)
        self._version = offer.version
        return adopted

    async def _adopt(self, offer: Offer, mode: CacheMode) -> AdoptionReport:
        """Run the adoption, in the engine's thread."""
        thread = self._llm_thread
        await thread.pause(clear_cache=mode == "recompute")
        cached = sum(group.num_cached for group in self._groups.values()) if mode == "recompute" else 0
        try:
            roots = await thread.call_workers("starling_adopt", offer.version)
        except WeightsError as error:  # some workers may have switched, others not
            thread.mark_lost(f"version {offer.version} was not adopted: {error}")
            raise EngineLostError(thread.lost_reason) from error
        await thread.set_version(offer.version)
        if mode == "salt":
            thread.salt = f"version {offer.version}"
            await thread.restart_unstarted()
        if not self._paused:
            await thread.resume()
        root = joined_root(offer, [root for root, _ in roots])
        return AdoptionReport(
            version=offer.version,
            proven=root == offer.root,
            root=root,
            layout_root=layout_root([rank_root for _, rank_root in roots]),
            recomputed_tokens=cached,
        )

    def sleep(self) -> None:
        """Free the device memory of weights and cache until `wake_up`; does nothing on CPUs.

        Raises:
            ConfigError: vLLM was started without sleep mode.
        """
        if not self._model_config.enable_sleep_mode and not self._llm_thread.on_cpu:
            raise ConfigError(
                "vllm frees its memory only with rollout.vllm.engine_args.enable_sleep_mode = true, which "
                "launch.colocate sets; set it, or launch.colocate = false"
            )
        self._llm_thread.call(self._llm_thread.sleep())

    def wake_up(self) -> None:
        """Allocate the memory again. The weights are undefined until the next adoption."""
        self._llm_thread.call(self._llm_thread.wake_up())
        self._version = -1

    def tensors(self) -> Mapping[str, Any]:
        """Return nothing: the weights are in other processes."""
        return {}

    def close(self) -> None:
        """Stop vLLM and its processes, within a deadline."""
        self._llm_thread.close()
