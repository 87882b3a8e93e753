"""A rollout whose vLLM has workers on two nodes, here both on this host: weights, losses, and the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
from engines import EngineDriver, forward_logprobs, publisher_process, random_prompt, read_model
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import Replica, exit_code, replica
from service import NAME, Service, make_checkpoints, service, settings
from test_policy_nodes import free_address, sentence
from warm import process_context

from starling.algo.tokenizer import load_tokenizer
from starling.common.observe.notify import NotifySocket
from starling.common.observe.process import EXIT_FAILED, EXIT_USAGE, StopSignal, run_service
from starling.common.service import SECTIONS, ServiceArguments, parse_arguments
from starling.common.settings import load
from starling.common.wire import messages as wire
from starling.rollout.engine.base import EngineLostError, EngineSpec
from starling.rollout.engine.model_config import read_config
from starling.rollout.settings import RolloutProcess
from starling.rollout.shell.engines import make_spec
from starling.rollout.shell.nodes import make_agent, setup_of
from starling.weightsync.offers.offer import Offer
from starling.weightsync.transports.endpoints import ServingOptions

TP = ("--rollout.vllm.tensor-parallel-size", "2")
PP = ("--rollout.vllm.pipeline-parallel-size", "2")


def step_until_lost(driver: EngineDriver) -> None:
    """Step until the engine is lost."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        driver.step()


def child_titled(part: str, parent: int) -> psutil.Process:
    """Return the child of a process whose title has `part`."""
    [found] = [child for child in psutil.Process(parent).children() if part in "".join(child.cmdline()[:1])]
    return found


def check_completion(served: Service, client: openai.OpenAI) -> None:
    """Generate with the present version, and compare log-probabilities with forward passes over its weights."""
    asked: Any = {"model": served.model, "prompt": "xyz", "max_tokens": 24, "logprobs": 0, "seed": 3}
    answer = client.completions.create(**asked)
    prompt = answer.starling["prompt_token_ids"][0]  # type: ignore[attr-defined]
    choice = answer.choices[0]
    assert choice.logprobs is not None
    logprobs = choice.logprobs.token_logprobs
    assert served.check(prompt, choice.starling, logprobs) == {served.version}  # type: ignore[attr-defined, arg-type]


def read(folder: Path, *flags: str) -> tuple[RolloutProcess, ServiceArguments]:
    """Return settings and command line of a node, as its process reads them."""
    own = ["--name", NAME, "--controller", "tcp://127.0.0.1:1", "--dir", str(folder.parent), "--network.curve", "false"]
    arguments = parse_arguments("rollout", [*own, *settings("rl", folder), *flags], RolloutProcess)
    return load(RolloutProcess, arguments.configs, arguments.flags, others=SECTIONS), arguments


def be_agent(folder: Path, flags: tuple[str, ...]) -> None:
    """Be the agent of node 1, in a process of its own."""
    made = make_agent(*read(folder, *flags, "--node-rank", "1"))
    raise SystemExit(run_service(f"{NAME}.node-1", lambda: made.run(StopSignal(), NotifySocket())))


def spec_of_node_0(folder: Path, wake: Callable[[], None], *flags: str) -> EngineSpec:
    """Return the spec of the engine of node 0, as its process makes it."""
    found, arguments = read(folder, *flags, "--node-rank", "0")
    config, serving = read_config(folder), ServingOptions("ucx", "127.0.0.1")
    tokenizer = load_tokenizer(folder, config)
    return make_spec(folder, found, NAME, config, tokenizer, wake, serving, setup_of(found, arguments, folder))


@pytest.mark.parametrize("parallel", [TP, pytest.param(PP, marks=pytest.mark.campaign)], ids=["tp", "pp"])
def test_engine_of_two_nodes_adopts_and_starts_again_after_a_loss(parallel: tuple[str, ...], tmp_path: Path) -> None:
    folders = make_checkpoints(tmp_path)
    models = [read_model(folder) for folder in folders]
    flags = ("--nnodes", "2", "--rdzv", free_address(), *parallel)
    agent = process_context().Process(target=be_agent, args=(folders[0], flags))
    agent.start()
    assert agent.pid is not None

    def check(driver: EngineDriver, version: int) -> None:
        [completion] = driver.generate(random_prompt(9, version)).completions
        wanted = forward_logprobs(models[version % 2], random_prompt(9, version), completion.token_ids.tolist())
        np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)
        assert set(completion.versions) == {version}

    def driver() -> EngineDriver:
        return EngineDriver(folders[0], make_spec=lambda folder, wake: spec_of_node_0(folder, wake, *flags))

    try:
        with publisher_process(folders) as publisher:
            for version, loss in ((1, True), (3, False)):
                with closing(driver()) as made:
                    engine = made.engine
                    assert [len(rank.shards) > 0 for rank in engine.layout().ranks] == [True, True]
                    check(made, 0)
                    plan, relays = publisher.plan(engine), list[Offer]()
                    publisher.pull(engine, plan, version, announce=relays.append)
                    adopted = engine.adopt("recompute")
                    assert adopted.proven
                    assert adopted.layout_root == publisher.layout_root
                    assert [len(relay.ranks) for relay in relays] == [2]
                    check(made, version)
                    [executor] = psutil.Process(agent.pid).children()
                    if loss:
                        for worker in executor.children():
                            worker.kill()
                        with pytest.raises(EngineLostError, match="executor 1 exited with code 1; see "):
                            step_until_lost(made)
                    else:
                        assert made.spec.nodes is not None
                        made.spec.nodes.is_over = True
            agent.join(DEADLINE_S)
            assert agent.exitcode == 0
    finally:
        agent.kill()


@pytest.mark.campaign
@pytest.mark.parametrize("parallel", [TP, PP], ids=["tp", "pp"])
def test_workers_of_both_nodes_pull_and_start_again_after_a_loss(parallel: tuple[str, ...], tmp_path: Path) -> None:
    agents: list[Replica] = []

    @contextmanager
    def agent(hub: FakeHub, folder: Path, flags: tuple[str, ...]) -> Iterator[None]:
        with replica(hub, NAME, folder, *flags, "--node-rank", "1", fresh=True) as process:
            agents.append(process)
            yield

    nodes = ("--nnodes", "2", "--rdzv", free_address(), *parallel)
    with service(tmp_path, *nodes, "--node-rank", "0", beside=agent) as served:
        client = served.client()
        check_completion(served, client)
        for _ in range(2):
            served.adopt()
            check_completion(served, client)
        executor = child_titled("rollout-0.executor-1", agents[0].pid)
        workers = executor.children()
        executor.kill()
        psutil.wait_procs([executor, *workers], DEADLINE_S)
        served.hub.heartbeat(NAME, lambda status: status.version == -1)
        served.hub.heartbeat(NAME, lambda status: status.version == 0)
        last, served.version = served.version, 0
        check_completion(served, client)
        served.version = last  # versions of a source grow
        served.adopt()
        check_completion(served, client)
        served.hub.send(NAME, wire.Drain(reason="the run is over"))
        served.process.communicate(timeout=DEADLINE_S)  # vLLM's own output may have the traceback of a lost worker
        assert served.process.returncode == 0
        assert exit_code(agents[0]) == 0


@pytest.mark.campaign
def test_nodes_that_do_not_fit_are_refused_with_a_sentence(tmp_path: Path) -> None:
    """None of them starts vLLM."""
    [folder] = make_checkpoints(tmp_path, 1)
    hub = FakeHub()
    join = (*settings("rl", folder), "--rollout.vllm.join-s", "60", "--network.lease-s", "2")
    nodes = ("--nnodes", "2", "--rdzv", free_address())

    def start(*flags: str) -> Any:
        return replica(hub, NAME, tmp_path, *join, *nodes, *flags)

    try:
        with start("--node-rank", "0", *TP) as first, start("--node-rank", "1", *PP) as second:
            found = sentence(second, EXIT_USAGE)
            assert (
                "rollout.vllm.pipeline_parallel_size of node 1 (" in found or "tensor_parallel_size of node 1" in found
            )
            assert "is not that of node 0; start all nodes with the same recipe and flags" in found
            first.send_signal(signal.SIGTERM)
            assert exit_code(first) == 0
        with start("--node-rank", "0", *TP, "--rollout.vllm.join-s", "1") as first:
            assert "node 1 of rollout-0 did not join at 127.0.0.1:" in sentence(first, EXIT_FAILED)
        with start("--node-rank", "0") as first:
            assert "make 1 worker, which 2 nodes cannot share equally" in sentence(first, EXIT_USAGE)
        with start("--node-rank", "1", *TP, "--rollout.engine", "transformers") as second:
            assert "computes on one host, and only 'vllm' on several" in sentence(second, EXIT_USAGE)
    finally:
        hub.close()
