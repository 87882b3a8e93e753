"""AsyncLLM in a thread of its own: everything that touches it, or what it is working on, runs in that thread."""

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

from starling.common.errors import StarlingError, WeightsError
from starling.rollout.engine.base import EngineLostError, EngineSpec, PartialCompletion
from starling.rollout.engine.vllm import adapters, cpu, processes
from starling.rollout.engine.vllm import launch as start
from starling.rollout.engine.vllm.groups import VllmCompletion, VllmGroup, sampling_arguments
from starling.rollout.engine.vllm.pull_progress import PullMessageReceiver
from starling.weightsync.plan.layout import Layout, decode_layout, encode, join_ranks

log = structlog.get_logger(__name__)
T = TypeVar("T")

ANSWER_S: Final = 120.0
"""How long an engine that lives may owe an answer before it counts as lost."""
STUCK_S: Final = 1.0
"""How long one that is lost may take to say so to each request."""
CLOSE_S: Final = 10.0
LOOK_EVERY_S: Final = 0.5
START_ENDS_S: Final = 60.0
"""How long a start that is given up may take to notice."""
PATIENCE_S: Final = 2.0
"""How long its processes get to end by themselves: some do not, and they keep nothing that could be lost."""


class AsyncLlmThread:
    """One vLLM engine: its processes, its thread, and the groups that it has."""

    def __init__(self, spec: EngineSpec, adapted: Layout | None = None) -> None:
        """Start it. Waits until its workers are ready.

        Args:
            spec: what it is made of.
            adapted: the adapters that make up a version, where they do.

        Raises:
            ConfigError: a setting that vLLM does not take.
            EngineLostError: it did not start within `rollout.vllm.start_timeout_s`.
        """
        self._spec, self._adapted = spec, adapted
        self._adapters: Any = None
        """What has a request computed with adapters, where there are any."""
        self._llm: Any = None
        self._lost: asyncio.Future[None] | None = None
        self._others = processes.engine_processes()
        self._processes: set[Any] = set()
        self._shared_memory: set[Path] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="starling-vllm-"))
        self.listener = PullMessageReceiver(self._folder)
        self.waiting: deque[VllmGroup] = deque()
        self.ended: deque[VllmGroup] = deque()
        """Groups that have ended, for whoever holds the engine."""
        self.loss = ""
        """Why the engine is lost; empty while it lives."""
        self.num_tokens = self._num_answers = 0
        self.salt = ""
        """What the cache of new requests is salted with."""
        self.closed = self.on_cpu = self._paused = False
        self._rows: set[VllmCompletion] = set()
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def model_config(self) -> Any:
        """What vLLM knows of the model."""
        return self._llm.model_config

    # --- for the thread that holds the engine ----------------------------------------------------------------------

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = ANSWER_S) -> T:
        """Run a coroutine in the engine's thread and return its result.

        Raises:
            EngineLostError: the engine went, or gave no answer within `timeout_s`.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            self.loss = self.loss or f"vLLM gave no answer for {timeout_s:g} s"
            self._loop.call_soon_threadsafe(self.lose, self.loss)  # nothing else is to wait for an answer either
            raise EngineLostError(self.loss) from error

    def add(self, group: VllmGroup) -> None:
        """Take a group in."""
        self.waiting.append(group)
        self._loop.call_soon_threadsafe(self._admit)

    def close(self) -> None:
        """End the engine and all of its processes, and remove what they leave."""
        if self.closed:
            return
        self.closed = True
        if self._llm is not None:
            done: Future[None] = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
            try:
                done.result(2 * CLOSE_S)
            except Exception as error:  # noqa: BLE001 - whatever it was: its processes are ended below
                log.warning("vLLM did not end in good order", error=str(error))
        processes.kill_processes(self._processes, CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        end = time.monotonic() + START_ENDS_S
        self._thread.join(LOOK_EVERY_S)
        while self._thread.is_alive() and time.monotonic() < end:  # still starting: what it starts must go, too
            processes.kill_processes(processes.engine_processes() - self._others, CLOSE_S)
            self._thread.join(LOOK_EVERY_S)
        if self._llm is not None and not self._thread.is_alive():
            self._end_late()
        self.listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        processes.remove_shared_memory(self._shared_memory)

    def _end_late(self) -> None:
        """End what came up after its start had been given up, and before anybody looked. Its thread has ended."""
        self.loss = "its start was given up"
        try:
            self._loop.run_until_complete(self._shut_down())
        except Exception as error:  # noqa: BLE001 - whatever it was: its processes are ended below
            log.warning("vLLM did not end in good order", error=str(error))
        processes.kill_processes(processes.engine_processes() - self._others, CLOSE_S)

    # --- in the engine's thread ------------------------------------------------------------------------------------

    async def drop(self, group: VllmGroup) -> tuple[PartialCompletion, ...]:
        """Take a group out; return what is there of its completions."""
        if group in self.waiting:
            self.waiting.remove(group)
        elif tasks := self._tasks.pop(group.number, None):
            for row in group.unfinished:
                row.again = False
                await self._abort(row)
            await self._end_tasks(tasks)
            self._admit()
        return tuple(row.partial() for row in group.rows)

    async def _end_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until vLLM has given rows up, or is lost: then it says no more than what has come of them."""
        assert self._lost is not None
        whole = asyncio.gather(*tasks, return_exceptions=True)
        either: set[asyncio.Future[Any]] = {whole, self._lost}
        await asyncio.wait(either, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            whole.cancel()
            await asyncio.wait(tasks, timeout=STUCK_S)

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop between two tokens."""
        await self.alive(self._llm.pause_generation(mode="keep", clear_cache=clear_cache))
        self._paused = True

    async def resume(self) -> None:
        """Go on."""
        await self.alive(self._llm.resume_generation())
        self._paused = False

    async def ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers' extensions and return their answers in the order of ranks.

        Raises:
            WeightsError: what went wrong in the first worker where something did.
            EngineLostError: one of them is gone.
        """
        answers = await self.alive(self._llm.collective_rpc(method, args=arguments))
        for rank, (problem, _) in enumerate(answers):
            if problem:
                raise WeightsError(f"Worker {rank}: {problem}")
        return [result for _, result in answers]

    async def set_version(self, version: int) -> None:
        """Stamp what is sampled from now on with `version`."""
        await self.alive(self._llm.update_weight_version(str(version)))

    async def restart_unbegun(self) -> None:
        """Begin rows that have no token yet anew, with the salt of now: they may not share what the old one made."""
        for row in [row for row in self._rows if not row.token_ids and row.collector is not None]:
            row.again = True
            await self._abort(row)

    async def sleep(self) -> None:
        """Give device memory away."""
        await self.alive(self._llm.sleep(level=2 if self._adapted is None else 1))  # what is below adapters comes back

    async def wake_up(self) -> None:
        """Take it back."""
        await self.alive(self._llm.wake_up())

    async def alive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await what the engine answers, unless it dies first."""
        from vllm.v1.engine.exceptions import EngineDeadError

        assert self._lost is not None
        task: asyncio.Future[Any] = asyncio.ensure_future(coroutine)
        await asyncio.wait({task, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and isinstance(task.exception(), EngineDeadError):  # it may know before `_lost` does
            self.lose("the engine's process ended")
        elif task.done() and (not self._lost.done() or task.exception() is None):
            result: T = task.result()
            return result
        task.cancel()
        raise EngineLostError(self.loss or "the engine's processes are gone")

    # --- starting and ending ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        from transformers import AutoConfig
        from vllm.platforms import current_platform

        from starling.rollout.engine.vllm import multimodal as media

        settings = self._spec.rollout.vllm
        self.on_cpu = bool(current_platform.is_cpu())
        config = AutoConfig.from_pretrained(self._spec.path, trust_remote_code=self._spec.model.trust_remote_code)
        media.check_model(config)
        if self._spec.rollout.load_weights:
            media.check_files(self._spec.path, config)
        media.take_prepared_prompts()
        if self.on_cpu:
            cpu.check_heads(config)
            cpu.check_experts(settings)
            cpu.do_without_torchvision()
        wanted = start.environment(self._spec, on_cpu=self.on_cpu)
        with start.with_environment(wanted):
            future = asyncio.run_coroutine_threadsafe(
                self._make(start.arguments(self._spec, self._adapted, on_cpu=self.on_cpu)), self._loop
            )
            try:
                future.result(settings.start_timeout_s)
            except TimeoutError as error:
                raise EngineLostError(
                    f"vLLM was not ready after rollout.vllm.start_timeout_s = {settings.start_timeout_s:g} s; what it "
                    "printed above may say why"
                ) from error
            except StarlingError:
                raise
            except Exception as error:
                reason = str(error).strip().split("\n", 1)[0].rstrip(".")
                raise EngineLostError(f"vLLM did not start: {reason}; what it printed above may say more") from error
        self._processes = processes.engine_processes() - self._others

    async def _make(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from starling.rollout.engine.vllm.executor import executor_class

        if self.closed:  # while vLLM was being imported
            raise EngineLostError("its start was given up")
        # It blocks for as long as it takes; the thread has nothing else to do yet.
        given = AsyncEngineArgs(**arguments)
        config = given.create_engine_config(UsageContext.ENGINE_CONTEXT)  # as `from_engine_args`
        self._llm = AsyncLLM(
            config, executor_class(config), not given.disable_log_stats, log_requests=given.enable_log_requests
        )
        self._lost = self._loop.create_future()
        self._llm.output_handler.add_done_callback(lambda _: self.lose("the engine's process ended"))
        self._watching = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        """Give up an engine that hangs."""
        silence_s = self._spec.rollout.engine_silence_s
        await wait_until_hung(lambda: self._num_answers if self._rows and not self._paused else None, silence_s)
        self.lose(f"it has requests, and sampled no token for rollout.engine_silence_s = {silence_s:g} s")

    def lose(self, reason: str) -> None:
        """Give the engine up."""
        assert self._lost is not None
        if not self._lost.done():
            self._lost.set_result(None)
        if not self.closed and not self.loss:
            self.loss = reason
            log.error("vLLM is lost", reason=self.loss)
            self._spec.wake()

    async def layout(self) -> Layout:
        """Make all workers ready; return the layout of the whole engine."""
        if self._adapted is None:
            described = await self.ask_workers("starling_describe", self._spec.weights.quantise)
        else:
            assert self._spec.model.lora is not None
            config = adapters.as_peft(self._spec.model.lora)
            described = await self.ask_workers("starling_adapt", encode(self._adapted), config)
            adapters.check_computed(await self.ask_workers("starling_missing"))
            self._adapters = adapters.request()
        self._shared_memory = processes.shared_memory(self._processes)
        layout = join_ranks(self._spec.name, [decode_layout(part) for part in described])
        weights = self._spec.weights
        arguments = (encode(layout), weights.digests, self.listener.path, weights.quantise)
        packed = await self.ask_workers("starling_join", *arguments)
        if weights.quantise:
            log.info("vLLM holds quantised weights", form=weights.quantise, packing_bytes=max(packed))
        return layout

    async def _shut_down(self) -> None:
        if not self.loss:
            try:
                await asyncio.wait_for(self.ask_workers("starling_close"), CLOSE_S / 2)
            except (TimeoutError, StarlingError) as error:
                log.warning("workers did not end in good order", error=str(error))
        for task in (self._watching, *(task for tasks in self._tasks.values() for task in tasks)):
            task.cancel()
        llm, self._llm = self._llm, None
        llm.shutdown(timeout=PATIENCE_S)

    # --- requests --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Hand waiting groups to vLLM while it has room: it begins rows one by one, as others end.

        What it cannot begin at once waits there, never more than one group, so that no step of it has a gap.
        """
        room = self._spec.rollout.max_rows
        while self.waiting and not self.loss and (not self._rows or len(self._rows) < room):
            if self._rows and self._spec.rollout.exclusive:
                break
            group = self.waiting.popleft()
            group.submitted = True
            rows = group.unfinished
            self._rows.update(rows)
            self._tasks[group.number] = [self._loop.create_task(self._follow(group, row)) for row in rows]
            if not rows:
                self._end(group)

    async def _follow(self, group: VllmGroup, row: VllmCompletion) -> None:
        """Have vLLM sample one completion, and take in what comes of it."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._sample(group, row)
            while row.again and row.status is None:
                row.begin_again()
                await self._sample(group, row)
            if row.status is None and not row.unwanted:
                group.failure = group.failure or "vLLM gave a completion up before it was whole"
        except EngineDeadError:
            self.lose("the engine's process ended")
        except Exception as error:  # noqa: BLE001 - whatever vLLM has against a request: the others go on
            group.failure = group.failure or f"vLLM cannot generate it: {str(error).rstrip('.')}"
        finally:
            if self.loss:
                self._salvage(group, row)
            self._rows.discard(row)
        if group.number in self._tasks and (group.failure or not group.unfinished):
            await self._finish(group)
        self._admit()

    async def _sample(self, group: VllmGroup, row: VllmCompletion) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from starling.rollout.engine.vllm.multimodal import engine_input

        salt, token_ids = self.salt, group.prompt_of(row)
        if group.items:
            prompt = engine_input(token_ids, group.items, salt)
        else:
            prompt = tokens_input(token_ids, cache_salt=salt or None)
        parameters = SamplingParams(
            output_kind=RequestOutputKind.DELTA, **sampling_arguments(group, row, self._spec.eos_token_ids)
        )
        row.collector = await self._llm.add_request(
            f"{group.number}-{row.index}", prompt, parameters, lora_request=self._adapters
        )
        row.again = not row.unwanted and salt != self.salt  # adopted meanwhile: see `restart_unbegun`
        if row.unwanted or row.again:
            await self._abort(row)
        finished = False
        while not finished:
            output = row.collector.get_nowait() or await row.collector.get()
            finished = output.finished
            self._take(group, row, output)

    def _take(self, group: VllmGroup, row: VllmCompletion, output: Any) -> None:
        self._num_answers += 1
        first = len(row.token_ids)
        self.num_tokens += row.take(output)
        listener = group.request.listener
        if listener is not None and len(row.token_ids) > first:
            listener(row.index, row.token_ids[first:], row.logprobs[first:])

    async def _finish(self, group: VllmGroup) -> None:
        """A group has no row left that goes on, or cannot be finished."""
        others = self._tasks.pop(group.number)
        if group.failure:
            for row in group.unfinished:
                await self._abort(row)
            await asyncio.gather(*(task for task in others if task is not asyncio.current_task()))
        self._end(group)

    def _end(self, group: VllmGroup) -> None:
        self._tasks.pop(group.number, None)
        self.ended.append(group)
        self._spec.wake()

    async def _abort(self, row: VllmCompletion) -> None:
        """Have vLLM give a row up; what it says last of it reaches the row's task."""
        row.unwanted = True
        if row.collector is not None and not self.loss:
            await self._llm.abort(row.collector.request_id, internal=True)

    def _salvage(self, group: VllmGroup, row: VllmCompletion) -> None:
        """Take in what came of a row in the last moment, and the versions of its tokens, which vLLM tells at an end."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if row.collector is None or self._llm is None:
            return
        for _ in range(2):
            try:
                output = row.collector.get_nowait()
            except EngineDeadError:
                output = None
            if output is not None:
                self._take(group, row, output)
            self._llm.output_processor.abort_requests([row.collector.request_id], internal=True)


# JOINED from starling.rollout.engine.vllm.silence: An engine that lives, has requests, and samples nothing:
# it hangs, and nobody else would ever notice.

NUM_CHECKS: Final = 16
"""How often it is looked at within the time that it may be silent."""


async def wait_until_hung(num_answers: Callable[[], int | None], silence_s: float) -> None:
    """Return when the engine has given no answer for `silence_s`.

    Looks are counted, and not the time: a machine that slept makes no engine hang.

    Args:
        num_answers: how many answers there were; None while none is due.
        silence_s: seconds.
    """
    before, num_silent = num_answers(), 0
    while num_silent < NUM_CHECKS:
        await asyncio.sleep(silence_s / NUM_CHECKS)
        answers = num_answers()
        num_silent = num_silent + 1 if answers is not None and answers == before else 0
        before = answers
