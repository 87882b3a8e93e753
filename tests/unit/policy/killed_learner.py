"""A learner that saves its state after every step in the background, and resumes from the newest state.

It reports `made N`, `saving N` and `saved N`, so that a test can kill it at any of these moments.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from starling.common.wire import messages as wire
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.saving import SavingSettings
from starling.policy.settings.supervised import SftStepSettings
from starling.policy.shell.saving import PolicySaver
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.data.examples import SftExample
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.learner import Learner

NUM_SFT, LAST = 2, 7
VOCABULARY = 23


def load() -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=VOCABULARY, num_hidden_layers=2, head_dim=8, max_position_embeddings=64, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def learner() -> Learner:
    optimizer = OptimizerSettings(learning_rate=3e-3, schedule="cosine", warmup_steps=1)
    algorithm = AlgorithmSettings(kl_coefficient=0.05)
    return Learner(
        load, PolicySettings(optimizer=optimizer, algorithm=algorithm, sft=SftStepSettings(optimizer=optimizer))
    )


def take(learner: Learner, step: int) -> None:
    """Make step `step`, deterministically."""
    generator = np.random.default_rng(step)

    def tokens(num: int) -> Any:
        return generator.integers(VOCABULARY, size=num).astype(np.int32)

    if step <= NUM_SFT:
        examples = [SftExample(tokens(4), tokens(num), f"sft/{num}") for num in (3, 5)]
        learner.supervise(examples, num_steps=NUM_SFT)
        return
    groups = [
        ScoredGroup(
            prompt_ids=tokens(4),
            completion_ids=tokens(9),
            logprobs=(-3.0 + 0.3 * generator.standard_normal(9)).astype(np.float32),
            versions=np.full(9, step - 1, dtype=np.int32),
            lengths=(2, 4, 3),
            rewards=tuple(generator.standard_normal(3).tolist()),
            prompt_id=f"train/{number}",
        )
        for number in range(2)
    ]
    learner.reinforce(groups, step=step, num_steps=LAST - NUM_SFT)


def saving_of(learner: Learner, folder: Path, report: Any = lambda line: None) -> PolicySaver:
    """Return the saver of `learner` in `folder`."""

    def answer(lease: str, message: Any, buffers: tuple[bytes, ...]) -> None:
        assert isinstance(message, wire.CheckpointSaved), message
        report(f"saved {message.step}")

    def broken(future: Future[None]) -> None:
        report(f"broken {future.exception()}")

    tokenizer: Any = None
    saving = PolicySaver(learner, tokenizer, SavingSettings(), "run", Storage(str(folder)))
    saving.connect(answer, broken)
    return saving


def resume_and_train(learner: Learner, saving: PolicySaver, report: Any = lambda line: None) -> int:
    """Resume, and make the remaining steps. Returns the version resumed from."""
    begin = saving.resume()
    for step in range(begin + 1, LAST + 1):
        take(learner, step)
        report(f"made {step}")
        saving.save(wire.SaveCheckpoint(lease=f"save:{step}", step=step, state=True))
        report(f"saving {step}")
    saving.leave(LAST)
    return begin


def run(folder: Path, pipe: Connection) -> None:
    """Make the remaining steps in a process of its own, and report into `pipe`."""
    torch.set_num_threads(1)
    lock = threading.Lock()  # states are reported by the thread that writes them

    def report(line: str) -> None:
        with lock:
            pipe.send(line)

    made = learner()
    resume_and_train(made, saving_of(made, folder, report), report)
