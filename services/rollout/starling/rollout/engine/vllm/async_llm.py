"""Thread that runs vLLM's AsyncLLM; AsyncLLM and the running groups are used in this thread only."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from starling.common.errors import ConfigError, StarlingError, WeightsError
from starling.common.wire.messages import ModelExperts
from starling.rollout.engine.base import EngineLostError, EngineSpec, PartialCompletion
from starling.rollout.engine.vllm import adapters, launch, processes
from starling.rollout.engine.vllm.experts import ExpertStages
from starling.rollout.engine.vllm.groups import VllmCompletion, VllmGroup, sampling_arguments
from starling.rollout.engine.vllm.nodes import EngineNodes
from starling.rollout.engine.vllm.pull_progress import PullMessageReceiver
from starling.rollout.engine.vllm.statistics import IDLE, EngineLoad, SchedulerStatistics, stat_logger
from starling.weightsync.offers.offer import Offer
from starling.weightsync.plan.layout import Layout, decode_layout, encode, join_ranks

log = structlog.get_logger(__name__)
T = TypeVar("T")

CALL_TIMEOUT_S: Final = 120.0
"""Timeout of a call to a live engine; after it the engine counts as lost."""
LOST_GRACE_S: Final = 1.0
"""How long a lost engine may take to report that to each request."""
CLOSE_S: Final = 10.0
POLL_S: Final = 0.5
START_ABORT_S: Final = 60.0
"""How long a cancelled start may take to stop."""
SHUTDOWN_S: Final = 2.0
"""How long vLLM's processes get to exit by themselves: some never do, and they hold no state worth keeping."""
NUM_HANG_CHECKS: Final = 16
"""How often the engine is polled within the timeout after which it counts as hung."""


class AsyncLlmThread:
    """One vLLM engine: its processes, its thread and its groups."""

    def __init__(self, spec: EngineSpec, adapter_layout: Layout | None = None) -> None:
        """Start vLLM and wait until its workers are ready.

        Args:
            spec: what the engine is built from.
            adapter_layout: the tensors of the adapters, if a version consists of adapters.

        Raises:
            ConfigError: a setting that vLLM does not take.
            EngineLostError: vLLM did not start within `rollout.vllm.start_timeout_s`.
        """
        self._spec, self._adapter_layout = spec, adapter_layout
        self._lora_request: Any = None
        """vLLM's name for the adapters, given with each request; None without adapters."""
        self._llm: Any = None
        self._lost: asyncio.Future[None] | None = None
        self._other_processes = processes.engine_processes()
        self._processes: set[Any] = set()
        self._nodes: EngineNodes | None = None
        """The other hosts of the engine, if it has several."""
        self._node_loss = ""
        self._shared_memory: set[Path] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="starling-vllm-"))
        self.pull_messages = PullMessageReceiver(self._folder)
        self.waiting: deque[VllmGroup] = deque()
        self.ended: deque[VllmGroup] = deque()
        """Groups that have ended, for the thread that owns the engine."""
        self.lost_reason = ""
        """Why the engine is lost; empty while it is alive."""
        self.num_tokens = self._num_outputs = 0
        self.statistics = SchedulerStatistics()
        self._expert_stages: ExpertStages | None = None
        """None until `record_experts`."""
        self.salt = ""
        """Salt of the prefix cache for new requests."""
        self.closed = self.on_cpu = self._paused = False
        self._running: set[VllmCompletion] = set()
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._start()
        except BaseException as error:  # raised again: its thread and processes must not stay
            self.close(str(error) if isinstance(error, ConfigError) else "")
            raise

    @property
    def model_config(self) -> Any:
        """vLLM's configuration of the model."""
        return self._llm.model_config

    @property
    def load(self) -> EngineLoad:
        """The load of vLLM's scheduler, which reports none after its last requests were aborted."""
        return self.statistics.load if self._running else IDLE

    def encoded(self, offer: Offer) -> bytes:
        """Return an offer as it travels to the workers, which call `WorkerPulls.pull` with it."""
        return encode(offer) if self._nodes is None else self._nodes.seal(encode(offer))

    # --- called by the thread that owns the engine -----------------------------------------------------------------

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Run a coroutine in the engine's thread and return its result.

        Raises:
            EngineLostError: the engine died, or did not answer within `timeout_s`.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            self.lost_reason = self.lost_reason or f"vLLM gave no answer for {timeout_s:g} s"
            self._loop.call_soon_threadsafe(
                self.mark_lost, self.lost_reason
            )  # nothing else shall wait for an answer either
            raise EngineLostError(self.lost_reason) from error

    def add(self, group: VllmGroup) -> None:
        """Queue a group."""
        self.waiting.append(group)
        self._loop.call_soon_threadsafe(self._admit)

    def close(self, problem: str = "") -> None:
        """Stop the engine and all of its processes, and remove their shared memory.

        `problem`: with which other nodes end, as a restart does not mend it.
        """
        if self.closed:
            return
        self.closed = True
        if self._nodes is not None and self.lost_reason:
            self._nodes.close()
        if self._llm is not None:
            done: Future[None] = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
            try:
                done.result(2 * CLOSE_S)
            except Exception as error:  # noqa: BLE001 - whatever it is: the processes are killed below
                log.warning("vLLM did not shut down cleanly", error=str(error))
        processes.kill_processes(self._processes, CLOSE_S)
        if self._nodes is not None:
            self._nodes.close(problem)
        self._loop.call_soon_threadsafe(self._loop.stop)
        end = time.monotonic() + START_ABORT_S
        self._thread.join(POLL_S)
        while self._thread.is_alive() and time.monotonic() < end:  # still starting: kill what it starts, too
            processes.kill_processes(processes.engine_processes() - self._other_processes, CLOSE_S)
            self._thread.join(POLL_S)
        if self._llm is not None and not self._thread.is_alive():
            self._shut_down_late()
        self.pull_messages.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        processes.remove_shared_memory(self._shared_memory)

    def _shut_down_late(self) -> None:
        """Stop an engine that came up after its start was cancelled. Its thread has ended."""
        self.lost_reason = "its start was cancelled"
        try:
            self._loop.run_until_complete(self._shut_down())
        except Exception as error:  # noqa: BLE001 - whatever it is: the processes are killed below
            log.warning("vLLM did not shut down cleanly", error=str(error))
        processes.kill_processes(processes.engine_processes() - self._other_processes, CLOSE_S)

    # --- run in the engine's thread --------------------------------------------------------------------------------

    async def remove(self, group: VllmGroup) -> tuple[PartialCompletion, ...]:
        """Remove a group; return its partial completions."""
        if group in self.waiting:
            self.waiting.remove(group)
        elif tasks := self._tasks.pop(group.number, None):
            for completion in group.unfinished:
                completion.restart = False
                await self._abort(completion)
            await self._end_tasks(tasks)
            self._admit()
        return group.partials()

    async def _end_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until vLLM has aborted the requests of `tasks`, or is lost."""
        assert self._lost is not None
        whole = asyncio.gather(*tasks, return_exceptions=True)
        either: set[asyncio.Future[Any]] = {whole, self._lost}
        await asyncio.wait(either, timeout=CALL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            whole.cancel()
            await asyncio.wait(tasks, timeout=LOST_GRACE_S)

    async def pause(self, *, clear_cache: bool) -> None:
        """Pause between two tokens."""
        await self._unless_lost(self._llm.pause_generation(mode="keep", clear_cache=clear_cache))
        self._paused = True

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._unless_lost(self._llm.resume_generation())
        self._paused = False

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `WorkerExtension` on all workers; return the results in rank order.

        Raises:
            WeightsError: the error of the first worker that had one.
            EngineLostError: a worker has died.
        """
        answers = await self._unless_lost(self._llm.collective_rpc(method, args=arguments))
        for rank, (problem, _) in enumerate(answers):
            if problem:
                raise WeightsError(f"Worker {rank}: {problem}")
        return [result for _, result in answers]

    async def record_experts(self) -> ModelExperts:
        """Have the workers record the experts of requests that ask for it; return the sizes of the model.

        Raises:
            WeightsError: a worker cannot record, such as one whose kernel hides the choice of the routers.
        """
        if self._expert_stages is None:
            self._expert_stages = ExpertStages.of(await self.call_workers("starling_record_experts"))
        return self._expert_stages.sizes

    async def set_version(self, version: int) -> None:
        """Label the tokens sampled from now on with `version`."""
        await self._unless_lost(self._llm.update_weight_version(str(version)))

    async def restart_unstarted(self) -> None:
        """Restart completions without tokens under the current salt, so that they share no cache of the old one."""
        unstarted = [one for one in self._running if not (one.token_ids or one.aborted) and one.collector is not None]
        for completion in unstarted:
            completion.restart = True
            await self._abort(completion)

    async def sleep(self) -> None:
        """Free device memory."""
        level = 2 if self._adapter_layout is None else 1  # level 1 keeps the base weights below adapters
        await self._unless_lost(self._llm.sleep(level=level))

    async def wake_up(self) -> None:
        """Allocate the device memory again."""
        await self._unless_lost(self._llm.wake_up())

    async def _unless_lost(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await an answer of the engine, unless the engine dies first."""
        from vllm.v1.engine.exceptions import EngineDeadError

        assert self._lost is not None
        task: asyncio.Future[Any] = asyncio.ensure_future(coroutine)
        await asyncio.wait({task, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and isinstance(task.exception(), EngineDeadError):  # it may be raised before `_lost` is set
            self.mark_lost("the engine's process ended")
        elif task.done() and (not self._lost.done() or task.exception() is None):
            result: T = task.result()
            return result
        task.cancel()
        raise EngineLostError(self.lost_reason or "the engine's processes have died")

    # --- start and shutdown ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        settings, host = self._spec.rollout.vllm, None
        self.on_cpu = launch.prepare(self._spec)
        if self._spec.nodes is not None:
            launch.check_nodes(self._spec, self._spec.nodes.arguments.num_nodes)
            served_at = self._spec.nodes.network.host
            self._nodes = EngineNodes(self._spec.nodes, self.pull_messages.pass_on, self._lose_node, served_at)
            host = self._nodes.host
        environment = launch.environment(self._spec, on_cpu=self.on_cpu, host=host)
        with launch.with_environment(environment):
            future = asyncio.run_coroutine_threadsafe(
                self._make(launch.arguments(self._spec, self._adapter_layout, on_cpu=self.on_cpu, host=host)),
                self._loop,
            )
            try:
                future.result(settings.start_timeout_s)
            except TimeoutError as error:
                raise EngineLostError(
                    f"vLLM was not ready after rollout.vllm.start_timeout_s = {settings.start_timeout_s:g} s; see its "
                    "output above for the reason"
                ) from error
            except StarlingError:
                raise
            except Exception as error:  # of vLLM, whose errors have no common type
                if self._node_loss:
                    raise EngineLostError(self._node_loss) from error
                reason = str(error).strip().split("\n", 1)[0].rstrip(".")
                raise EngineLostError(f"vLLM did not start: {reason}; see its output above") from error
        self._processes = processes.engine_processes() - self._other_processes

    def _lose_node(self, reason: str) -> None:
        """Lose the engine with one of its nodes, also while it starts. Called in a thread of its own."""
        self._node_loss = reason
        if self._nodes is not None:
            self._nodes.close()  # the others join the next engine
        while self._lost is None and not self.closed:  # workers here wait for those there
            processes.kill_processes(processes.engine_processes() - self._other_processes, CLOSE_S)
            time.sleep(POLL_S)
        if not self.closed:
            self._loop.call_soon_threadsafe(self.mark_lost, reason)

    async def _make(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from starling.rollout.engine.vllm.executor import executor_class

        if self.closed:  # while vLLM was being imported
            raise EngineLostError("its start was cancelled")
        # This blocks until the start is complete; the thread has nothing else to do yet.
        engine_args = AsyncEngineArgs(**arguments)
        config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)  # as `from_engine_args`
        self._llm = AsyncLLM(
            config,
            executor_class(config),
            not engine_args.disable_log_stats,
            log_requests=engine_args.enable_log_requests,
            stat_loggers=[stat_logger(self.statistics, replaces_prometheus=engine_args.disable_log_stats)],
        )
        self._lost = self._loop.create_future()
        self._llm.output_handler.add_done_callback(lambda _: self.mark_lost("the engine's process ended"))
        self._watchdog = self._loop.create_task(self._watch_for_hang())

    async def _watch_for_hang(self) -> None:
        """Mark the engine as lost when it hangs."""
        silence_s = self._spec.rollout.engine_silence_s
        await wait_until_hung(lambda: self._num_outputs if self._running and not self._paused else None, silence_s)
        self.mark_lost(f"it has requests, and sampled no token for rollout.engine_silence_s = {silence_s:g} s")

    def mark_lost(self, reason: str) -> None:
        """Mark the engine as lost, for `reason`."""
        assert self._lost is not None
        if not self._lost.done():
            self._lost.set_result(None)
        if not self.closed and not self.lost_reason:
            self.lost_reason = reason
            log.error("vLLM is lost", reason=self.lost_reason)
            self._spec.wake()

    async def prepare(self) -> None:
        """Prepare all workers for requests with the weights that they have loaded."""
        await self.call_workers("starling_prepare")
        self._shared_memory = processes.shared_memory(self._processes)

    async def layout(self) -> Layout:
        """Prepare all workers for pulls; return the layout of the whole engine."""
        if self._adapter_layout is None:
            parts = await self.call_workers("starling_describe", self._spec.weights.quantise)
        else:
            assert self._spec.model.lora is not None
            config = adapters.as_peft(self._spec.model.lora)
            parts = await self.call_workers("starling_adapt", encode(self._adapter_layout), config)
            adapters.check_computed(await self.call_workers("starling_missing"))
            self._lora_request = adapters.lora_request()
        self._shared_memory = processes.shared_memory(self._processes)
        layout = join_ranks(self._spec.name, [decode_layout(part) for part in parts])
        weights = self._spec.weights
        serving = None if self._spec.serving is None else tuple(self._spec.serving)
        arguments = (encode(layout), weights.digests, self.pull_messages.path, serving)
        extra_bytes = max(await self.call_workers("starling_join", *arguments))
        if weights.quantise:
            log.info("vLLM holds quantised weights", form=weights.quantise, packing_bytes=extra_bytes)
        elif extra_bytes:
            log.info("vLLM loads some modules part by part", part_bytes=extra_bytes)
        return layout

    async def _shut_down(self) -> None:
        if not self.lost_reason:
            try:
                await asyncio.wait_for(self.call_workers("starling_close"), CLOSE_S / 2)
            except (TimeoutError, StarlingError) as error:
                log.warning("vLLM workers did not shut down cleanly", error=str(error))
            if self._nodes is not None:
                self._nodes.end()  # before the workers here end, which those there would take for a loss
        for task in (self._watchdog, *(task for tasks in self._tasks.values() for task in tasks)):
            task.cancel()
        llm, self._llm = self._llm, None
        llm.shutdown(timeout=SHUTDOWN_S)

    # --- requests --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Submit waiting groups to vLLM while it has free rows.

        vLLM queues the completions of at most one group beyond its rows, so that its batch stays full.
        """
        room = self._spec.rollout.max_rows
        while self.waiting and not self.lost_reason and (not self._running or len(self._running) < room):
            if self._running and self._spec.rollout.exclusive:
                break
            group = self.waiting.popleft()
            group.submitted = True
            completions = group.unfinished
            self._running.update(completions)
            self._tasks[group.number] = [
                self._loop.create_task(self._run_completion(group, completion)) for completion in completions
            ]
            if not completions:
                self._end(group)

    async def _run_completion(self, group: VllmGroup, completion: VllmCompletion) -> None:
        """Have vLLM sample one completion, restarting it when needed, and collect its output."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._sample(group, completion)
            await self._take_experts(group, completion)
            while completion.restart and completion.status is None:
                completion.prepare_restart()
                await self._sample(group, completion)
                await self._take_experts(group, completion)
            if completion.status is None and not completion.aborted:
                group.failure = group.failure or "vLLM aborted a completion"
        except EngineDeadError:
            self.mark_lost("the engine's process ended")
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises for one request: the others continue
            group.failure = group.failure or f"vLLM cannot generate it: {str(error).rstrip('.')}"
        finally:
            if self.lost_reason:
                self._drain(group, completion)
                self._note_lost_experts(group, completion)
            self._running.discard(completion)
        has_ended = not group.unfinished and self._running.isdisjoint(group.completions)
        if group.number in self._tasks and (group.failure or has_ended):
            await self._finish(group)
        self._admit()

    async def _sample(self, group: VllmGroup, completion: VllmCompletion) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from starling.rollout.engine.vllm.multimodal import engine_input

        salt, token_ids = self.salt, group.prompt_of(completion)
        if group.items:
            prompt = engine_input(token_ids, group.items, salt)
        else:
            prompt = tokens_input(token_ids, cache_salt=salt or None)
        parameters = SamplingParams(
            output_kind=RequestOutputKind.DELTA, **sampling_arguments(group, completion, self._spec.eos_token_ids)
        )
        completion.collector = await self._llm.add_request(
            f"{group.number}-{completion.index}", prompt, parameters, lora_request=self._lora_request
        )
        # With another salt, a version was adopted meanwhile: see `restart_unstarted`.
        completion.restart = not completion.aborted and salt != self.salt
        if completion.aborted or completion.restart:
            await self._abort(completion)
        finished = False
        while not finished:
            output = completion.collector.get_nowait() or await completion.collector.get()
            finished = output.finished
            self._handle_output(group, completion, output)

    async def _take_experts(self, group: VllmGroup, completion: VllmCompletion) -> None:
        """Take the experts of a request that has ended from the workers, which forget them."""
        if not group.is_routed:
            return
        assert self._expert_stages is not None
        try:
            parts = await self.call_workers("starling_take_experts", completion.collector.request_id)
        except EngineLostError:
            return  # see `_note_lost_experts`
        group.add_experts(completion, self._expert_stages.join(parts))

    def _note_lost_experts(self, group: VllmGroup, completion: VllmCompletion) -> None:
        """Mark the tokens of a lost engine as unrecorded: their experts were in its workers."""
        if group.is_routed and completion.experts is None:
            assert self._expert_stages is not None
            group.add_experts(completion, self._expert_stages.nothing())

    def _handle_output(self, group: VllmGroup, completion: VllmCompletion, output: Any) -> None:
        self._num_outputs += 1
        first = len(completion.token_ids)
        self.num_tokens += completion.add_output(output)
        listener = group.request.listener
        if listener is not None and len(completion.token_ids) > first:
            listener(completion.index, completion.token_ids[first:], completion.logprobs[first:])

    async def _finish(self, group: VllmGroup) -> None:
        """End a group that has no running completion left, or that has failed."""
        others = self._tasks.pop(group.number)
        if group.failure:
            for completion in group.unfinished:
                await self._abort(completion)
            await asyncio.gather(*(task for task in others if task is not asyncio.current_task()))
        self._end(group)

    def _end(self, group: VllmGroup) -> None:
        self._tasks.pop(group.number, None)
        self.ended.append(group)
        self._spec.wake()

    async def _abort(self, completion: VllmCompletion) -> None:
        """Have vLLM abort a completion; its last output reaches the completion's task."""
        completion.aborted = True
        if completion.collector is not None and not self.lost_reason:
            await self._llm.abort(completion.collector.request_id, internal=True)

    def _drain(self, group: VllmGroup, completion: VllmCompletion) -> None:
        """Collect the last output of a completion, and the versions of its tokens, which vLLM reports at the end."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if completion.collector is None or self._llm is None:
            return
        for _ in range(2):
            try:
                output = completion.collector.get_nowait()
            except EngineDeadError:
                output = None
            if output is not None:
                self._handle_output(group, completion, output)
            self._llm.output_processor.abort_requests([completion.collector.request_id], internal=True)


async def wait_until_hung(num_outputs: Callable[[], int | None], timeout_s: float) -> None:
    """Return when the engine has produced no output for `timeout_s`.

    Counts polls instead of time: an engine does not count as hung because the machine was suspended.

    Args:
        num_outputs: returns the number of outputs so far; None while none is due.
        timeout_s: seconds.
    """
    before, num_silent = num_outputs(), 0
    while num_silent < NUM_HANG_CHECKS:
        await asyncio.sleep(timeout_s / NUM_HANG_CHECKS)
        outputs = num_outputs()
        num_silent = num_silent + 1 if outputs is not None and outputs == before else 0
        before = outputs
