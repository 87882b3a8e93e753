"""The example of docs/how-to/extend/algorithm.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)
PAGE = Path(__file__).parents[4] / "docs/how-to/extend/algorithm.md"


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Write the page's file, and return its name for a recipe."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 30
    (tmp_path / "best_of.py").write_text(code[1])
    return f"{tmp_path / 'best_of.py'}:algorithm"


def test_user_algorithm_of_docs_learns(name: str, tiny: Callable[..., Any]) -> None:
    model = tiny()
    settings = PolicySettings(
        optimizer=OptimizerSettings(learning_rate=1e-2),
        algorithm=AlgorithmSettings(name=name, options={"keep": 1}),
    )
    trainer = RlTrainer(model, settings, total_steps=12)
    prompt, rewarded_token = np.array([5, 6], np.int32), 9

    def likelihood() -> float:
        with torch.no_grad():
            return float(
                model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].softmax(-1)[rewarded_token]
            )

    before = likelihood()
    for step in range(1, 13):
        ids = np.array([rewarded_token, 3, 4, 7], np.int32)
        with torch.no_grad():
            logprobs = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].log_softmax(-1)
        drawn = logprobs[torch.from_numpy(ids.astype(np.int64))].numpy()
        versions = np.full(4, step - 1, np.int32)
        group = ScoredGroup(prompt, ids, drawn, versions, (1, 1, 1, 1), (1.0, 0.0, 0.2, 0.1), "p")
        metrics = trainer.step([group], step=step)
    assert likelihood() > before + 0.2
    assert metrics["imitated"] == 1.0  # the others have no advantage, and are left out
    assert metrics["num_trained_tokens"] == 1.0


def test_user_algorithm_unknown_option_is_refused(name: str, tiny: Callable[..., Any]) -> None:
    chosen = PolicySettings(algorithm=AlgorithmSettings(name=name, clip_low=0.1))
    with pytest.raises(ConfigError, match=r"no option 'clip_low': imitate takes max_weight, and best_of_group takes k"):
        RlTrainer(tiny(), chosen, total_steps=1)
