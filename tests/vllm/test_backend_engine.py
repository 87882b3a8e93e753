"""vLLM's weight transfer with the backend `starling`, in one process: what is sent is what computes.

Each check runs in a process of its own, because an `LLM` without processes leaves its state in the one that made it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import checkpoint, forward_logprobs, read_model
from warm import process_context

from starling.common.errors import WeightsError

DEADLINE_S = 240.0
PROMPT = [5, 17, 3, 60]


def in_process(check: Callable[..., None], *arguments: Any) -> None:
    """Run a check in a process; it must succeed."""
    context: Any = process_context()
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(check, arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert mine.poll(DEADLINE_S), f"no answer within {DEADLINE_S:g} s"
        if error := mine.recv():
            pytest.fail(error)
    finally:
        process.kill()
        process.join()
        mine.close()


def _run(check: Callable[..., None], arguments: tuple[Any, ...], answer: Connection) -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0", GLOO_SOCKET_IFNAME="lo")
    try:
        check(*arguments)
        answer.send("")
    except BaseException:  # noqa: BLE001 - the test shows it
        answer.send(traceback.format_exc())
    os._exit(0)  # threads of vLLM must not keep the process alive


def engine(folder: Path) -> Any:
    """Start vLLM on a checkpoint."""
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    return LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        kv_cache_memory_bytes=16 << 20,
        weight_transfer_config=WeightTransferConfig(backend="starling"),
    )


def trainer_of(llm: Any, model: Any, **options: Any) -> Any:
    """Return vLLM's trainer side for a model."""
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from starling.weightsync.vllm.backend.clients import LocalEngine
    from starling.weightsync.vllm.backend.sender import SenderOptions
    from starling.weightsync.vllm.backend.trainer import StarlingTrainerInitInfo

    info = StarlingTrainerInitInfo(options=SenderOptions(**options), rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=LocalEngine(llm), source=ModuleSource(model))


def check_samples(llm: Any, model: Any, version: str) -> None:
    """Sample with vLLM; compare the log-probabilities with those of a model, and the label of the tokens."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=8, temperature=1.0, logprobs=0, detokenize=False, seed=1)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    (output,) = answer.outputs
    found = [logprobs[token].logprob for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)]
    expected = forward_logprobs(model, PROMPT, list(output.token_ids))
    torch.testing.assert_close(torch.tensor(found), torch.from_numpy(expected), rtol=0.0, atol=2e-5)
    assert [span.version for span in output.weight_versions] == [version]


def check_versions(folder: Path, family: str) -> None:
    """Send two versions, the second with few changes; and stage a third one before the switch to it."""
    started, trained = (checkpoint(folder / str(seed), family, seed) for seed in range(2))
    llm, model = engine(started), read_model(trained)
    trainer = trainer_of(llm, model, delta_versions=2)
    check_samples(llm, read_model(started), "default")
    trainer.send_weights()
    check_samples(llm, model, "1")
    for parameter in model.parameters():
        parameter.view(-1)[::97] += 0.05
    trainer.send_weights()
    check_samples(llm, model, "2")
    (report,) = trainer.report.pulls.values()
    assert report.num_deltas
    assert sum(report.bytes_by_source.values()) < report.size_bytes / 5
    model.load_state_dict(read_model(started).state_dict())
    trainer.stage_weights()
    before = read_model(trained)
    for mine, theirs in zip(before.parameters(), read_model(trained).parameters(), strict=True):
        mine.copy_(theirs)
        mine.view(-1)[::97] += 0.05
    check_samples(llm, before, "2")
    trainer.send_weights()
    check_samples(llm, model, "3")
    trainer.shutdown()


def check_faults(folder: Path) -> None:
    """Check what is said when the two sides do not belong together."""
    started = checkpoint(folder / "started", "qwen3", 0)
    other = checkpoint(folder / "other", "llama", 0)
    other_weights = checkpoint(folder / "other weights", "qwen3", 1)
    llm = engine(started)
    llm.start_weight_update()
    with pytest.raises(WeightsError, match=r"^No trainer has joined vLLM's backend 'starling'"):
        llm.update_weights({"update_info": {"version": 1}})
    with pytest.raises(
        WeightsError, match=r"^Worker 0 cannot join its trainer: the trainer at 127.0.0.1:9 cannot be r"
    ):
        llm.init_weight_transfer_engine({"init_info": {"address": "127.0.0.1:9", "secret": "", "connect_s": 1.0}})
    with pytest.raises(WeightsError, match=r"is of another backend \(.*'master_port'\)"):
        llm.init_weight_transfer_engine({"init_info": {"master_port": 1}})
    with pytest.raises(WeightsError, match=r"computes with model_type = 'qwen3', and the trainer's model has 'llama'"):
        trainer_of(llm, read_model(other))
    model = read_model(started)
    model.config.rope_parameters["rope_theta"] *= 2
    with pytest.raises(WeightsError, match=r"computes with rope_parameters.rope_theta = "):
        trainer_of(llm, model)
    model = read_model(started)
    model.model.norm = torch.nn.Identity()
    with pytest.raises(WeightsError, match=r"another model than the trainer's.*model.norm.weight .* is unknown"):
        trainer_of(llm, model)
    trainer = trainer_of(llm, read_model(other_weights))
    trainer.stage_weights()
    llm.start_weight_update()
    with pytest.raises(WeightsError, match=r"^The trainer has lost this engine, which keeps the weights that it has"):
        llm.update_weights({"update_info": {"version": 1, "engines": ["another"]}})
    check_samples(llm, read_model(started), "default")
    trainer.send_weights()
    check_samples(llm, read_model(other_weights), "1")
    trainer.shutdown()


def engine_of_rank(rank: int, store: Path, answer: Connection) -> None:
    """Be a worker whose process has made its own configuration, as on another host; tell what it calls its engine."""
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.parallel_state import init_distributed_environment

    from starling.weightsync.vllm.backend.engine import StarlingWeightTransferEngine

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    init_distributed_environment(2, rank, f"file://{store}", rank, "gloo")
    config = WeightTransferConfig(backend="starling")
    made = StarlingWeightTransferEngine(config, VllmConfig(), torch.device("cpu"), torch.nn.Identity())
    answer.send((made.vllm_config.instance_id, made._engine, made._engine_size))
    os._exit(0)


def test_workers_with_configurations_of_their_own_name_one_engine(tmp_path: Path) -> None:
    context: Any = process_context()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=engine_of_rank, args=(rank, tmp_path / "store", theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        assert all(mine.poll(DEADLINE_S) for mine, _ in pipes), f"no answer within {DEADLINE_S:g} s"
        (first, *named), (second, *others) = (mine.recv() for mine, _ in pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert first != second
    assert named == others == [first, 2]


def test_backend_is_installed() -> None:
    (found,) = {entry.value for entry in entry_points(group="vllm.general_plugins") if entry.name == "starling"}
    assert found == "starling.weightsync.vllm.backend.plugin:register"


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe of odd sizes", marks=pytest.mark.campaign)])
def test_versions_compute_what_the_trainer_computes(family: str, tmp_path: Path) -> None:
    in_process(check_versions, tmp_path, family)


def test_what_does_not_belong_together_is_named(tmp_path: Path) -> None:
    in_process(check_faults, tmp_path)
