"""A policy whose ranks, and a rollout whose workers are on two hosts: network namespaces, joined by a cable."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from host_faults import Network, network
from system_runs import Command, attempt, checkpoints, make_workdir, metrics, num_steps, starling_command, trained

pytestmark = [pytest.mark.system, pytest.mark.campaign]

ADDRESS = "10.213.0.1:29400"
NUM_SFT, NUM_RL = 3, 60
RUN_S = 600.0
"""Deadline of a run, on a busy machine with fewer processors than the policy has ranks."""


def make_run(folder: Path) -> Path:
    """Create the working folder of a run whose policy has four ranks on two hosts."""
    return make_workdir(
        folder,
        network={"host": "10.213.0.1", "heartbeat_s": 0.3, "lease_s": 3.0},
        policy={"parallel": {"tp": 2, "dp_shard": 2}, "transport": "tcp"},
        rl={"num_steps": NUM_RL},
        controller={"save_every": 4, "save_rest_s": 0.0},
        launch={"num_rollouts": 2, "max_restarts": 9, "policy_nodes": 2, "policy_rdzv": ADDRESS},
    )


def agent_starter(folder: Path, cable: Network, stack: ExitStack, role: str = "policy") -> Callable[[], Command]:
    """Return a function that starts the agent of node 1 on the far host, as the run says."""
    run = attempt(folder)
    number = iter(range(9))

    def start() -> Command:
        address = json.loads((run / "controller.json").read_text())["address"]
        arguments = ["--config", str(run / "config.toml"), "--dir", str(run), "--controller", address]
        arguments += ["--nnodes", "2", "--node-rank", "1", "--rdzv", ADDRESS, "--network.host", "10.213.0.2"]
        prefix, name = cable.command_prefix(cable.far), f"agent-{next(number)}"
        return stack.enter_context(starling_command(folder, role, *arguments, name=name, prefix=prefix))

    return start


def test_run_goes_on_when_a_rank_a_node_or_the_network_is_lost(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with network() as cable, ExitStack() as stack:
        prefix = cable.command_prefix(cable.near)
        command = stack.enter_context(starling_command(folder, "run", "tiny.toml", name="run", prefix=prefix))
        command.wait_for_output("policy-0 waits for 1 node; on each host: starling policy --config")
        command.wait_until((attempt(folder) / "controller.json").exists, "the controller's address")
        start = agent_starter(folder, cable, stack)
        agents = [start()]

        def lose(number: int, description: str, fault: Callable[[], None], mend: Callable[[], None]) -> None:
            made = num_steps(folder)
            fault()
            command.wait_for_output(f"restarting it in {2.0**number / 4:g} s ({number} of 9 times)")
            mend()
            command.wait_until(lambda: num_steps(folder) >= made + 5, f"steps after {description}", RUN_S)

        command.wait_until(lambda: trained(folder), "a step of reinforcement", RUN_S)
        titled = agents[0].process_titled
        lose(1, "the death of a rank", titled("policy-0.rank-3").kill, lambda: None)
        lose(2, "the death of an agent", titled("policy-0.node-1").kill, lambda: agents.append(start()))
        lose(3, "the loss of the network", cable.cut, cable.restore)
        assert command.wait(RUN_S) == 0, command.transcript()
        assert agents[1].wait() == 0, agents[1].transcript()
    assert [line["step"] for line in metrics(folder, "step")] == list(range(1, NUM_SFT + NUM_RL + 1))
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert len(trained(folder)) == NUM_RL * 4
    assert checkpoints(folder) == [f"step-{NUM_SFT + NUM_RL}"]
    adopted = metrics(folder, "adopted")
    assert {line["replica"] for line in adopted} == {"rollout-0", "rollout-1"}
    assert all(line["attested"] for line in adopted)
    log = (attempt(folder) / "logs" / "policy-0.log").read_text()
    assert "starling policy-0: rank 3 was killed by SIGKILL, and the replica starts again" in log
    assert log.count(") of policy-0 is gone, and the replica starts again") == 2


def test_run_goes_on_when_a_worker_a_node_or_the_network_of_a_rollout_is_lost(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    num_rl = 150  # an engine starts three times more
    vllm = {"tensor_parallel_size": 2, "kv_cache_mb": 32, "enforce_eager": True, "start_timeout_s": RUN_S}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": True}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    alphabet = string.ascii_letters + string.digits + ">-"  # more than one worker's rows of the embedding
    folder = make_workdir(
        tmp_path,
        network={"host": "10.213.0.1", "heartbeat_s": 0.3, "lease_s": 3.0},
        model={"scratch": {"alphabet": alphabet, "max_length": 24, "config": sizes | heads}},
        policy={"transport": "tcp"},
        rollout={"engine": "vllm", "max_engine_restarts": 9, "vllm": vllm},
        rl={"num_steps": num_rl},
        launch={"num_rollouts": 1, "max_restarts": 9, "rollout_nodes": 2, "rollout_rdzv": ADDRESS},
    )
    with network() as cable, ExitStack() as stack:
        prefix = cable.command_prefix(cable.near)
        command = stack.enter_context(starling_command(folder, "run", "tiny.toml", name="run", prefix=prefix))
        command.wait_for_output("rollout-0 waits for 1 node; on each host: starling rollout --config")
        command.wait_until((attempt(folder) / "controller.json").exists, "the controller's address")
        start = agent_starter(folder, cable, stack, "rollout")
        agents = [start()]

        def lose(description: str, fault: Callable[[], object], mend: Callable[[], object]) -> None:
            made, lost = num_steps(folder), num_losses(folder)
            fault()
            command.wait_until(lambda: num_losses(folder) > lost, description, RUN_S)
            mend()
            command.wait_until(lambda: num_steps(folder) >= made + 5, f"steps after {description}", RUN_S)

        command.wait_until(lambda: trained(folder), "a step of reinforcement", RUN_S)
        lose("the death of a worker", lambda: kill_workers(agents[0]), lambda: None)
        lose("the death of an agent", lambda: agents[0].kill(), lambda: agents.append(start()))
        lose("the loss of the network", cable.cut, cable.restore)
        assert command.wait(RUN_S) == 0, command.transcript()
        assert agents[1].wait() == 0, agents[1].transcript()
    assert [line["step"] for line in metrics(folder, "step")] == list(range(1, NUM_SFT + num_rl + 1))
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert len(trained(folder)) == num_rl * 4
    adopted = metrics(folder, "adopted")
    assert adopted
    assert all(line["attested"] for line in adopted)


def kill_workers(agent: Command) -> None:
    """Kill vLLM's workers on the far host."""
    for process in agent.process_titled("rollout-0.executor-1").children():
        process.kill()


def num_losses(folder: Path) -> int:
    """Return how many engines the rollout has lost."""
    return (attempt(folder) / "logs" / "rollout-0.log").read_text().count("engine_lost ")
