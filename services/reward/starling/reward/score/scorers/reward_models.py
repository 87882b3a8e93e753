"""Scorers that call the reward models of others, whose packages are installed by whoever wants them.

Each is a class in a file of its own, which imports its packages in `setup`: to check a recipe, or to start a worker of
other scorers, needs none of them. Imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
from typing import Final, NamedTuple

from starling.common.errors import ConfigError


class RewardModel(NamedTuple):
    """Where the scorer of a reward model is, and what it imports."""

    scorer: str
    """``module:class``."""
    packages: tuple[str, ...]
    """Modules that it imports."""
    install: str
    """What to give to `pip install`."""
    checks_early: bool = False
    """Whether it can be made, without `setup`, where its folders are not: its options are then checked there, too."""


_SCORERS: Final = "starling.reward.score.scorers"
_TRANSFORMERS: Final = "torch transformers pillow"
_MODELS: Final = f"{_SCORERS}.models"
REWARD_MODELS: Final[dict[str, RewardModel]] = {
    "judge": RewardModel(f"{_SCORERS}.judge.scorer:Judge", ("httpx2",), "httpx2", checks_early=True),
    "service": RewardModel(f"{_SCORERS}.service:Service", ("httpx2",), "httpx2", checks_early=True),
    "reward_model": RewardModel(
        f"{_MODELS}.sequence:SequenceRewardModel",
        ("torch", "transformers"),
        "starling-reward[models]",
        checks_early=True,
    ),
    "verifiers_rubric": RewardModel(
        f"{_SCORERS}.rubric:VerifiersRubric", ("verifiers",), "starling-reward[verifiers]", checks_early=True
    ),
    "cosmos_reason1": RewardModel(
        f"{_MODELS}.cosmos_reason1:CosmosReason1", ("torch", "transformers", "PIL"), _TRANSFORMERS
    ),
    "dance_grpo": RewardModel(
        f"{_MODELS}.dance_grpo:VideoAlign", ("torch", "cv2"), "torch opencv-python-headless, and the code of VideoAlign"
    ),
    "gen_eval": RewardModel(f"{_MODELS}.gen_eval.scorer:GenEval", ("torch", "transformers", "PIL"), _TRANSFORMERS),
    "hpsv2": RewardModel(f"{_MODELS}.hpsv2:Hpsv2", ("torch", "transformers", "PIL"), _TRANSFORMERS),
    "hpsv3": RewardModel(f"{_MODELS}.hpsv3:Hpsv3", ("hpsv3",), "hpsv3"),
    "image_reward": RewardModel(f"{_MODELS}.image_reward:ImageReward", ("torch", "ImageReward"), "image-reward"),
    "unified_reward": RewardModel(f"{_MODELS}.unified_reward:UnifiedReward", ("httpx2", "PIL"), "httpx2 pillow"),
    "pickscore": RewardModel(
        f"{_MODELS}.pickscore:PickScore", ("torch", "transformers", "PIL"), "torch transformers pillow"
    ),
}
"""By the name of the scorer. That of a reward type of Cosmos-RL answers its requests."""

CODE_OPTIONS: Final = {"verifiers_rubric": "rubric", "ocr": "recogniser"}
"""By the name of a scorer the option that names code of the user, as ``module:attribute``."""

COSMOS_TYPES: Final = (
    "cosmos_reason1",
    "dance_grpo",
    "gen_eval",
    "hpsv2",
    "hpsv3",
    "image_reward",
    "ocr",
    "pickscore",
    "unified_reward",
)
"""Reward types of Cosmos-RL. A scorer of the name, or with it as its label, answers requests for it."""


def check_reward_model(name: str) -> None:
    """Raise ConfigError, with what to install, unless the scorer of a reward model can be imported here."""
    model = REWARD_MODELS.get(name)
    if model is None:
        raise ConfigError(
            f"Scorer {name!r} is a reward type of Cosmos-RL without a scorer here: install a package that offers it as "
            f"an entry point of `starling.scorers`, or give your own class and `label = {name!r}`."
        )
    missing = [package for package in model.packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"Scorer {name!r} needs {', '.join(missing)}, which is not installed here: pip install {model.install}."
        )
