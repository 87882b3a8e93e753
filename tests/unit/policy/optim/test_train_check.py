"""Invalid optimizer settings are refused before the first step, in a sentence that names the setting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch

from starling.common.errors import ConfigError
from starling.common.settings import validate
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.optim.optimizer import check_optimizers

torch.set_num_threads(1)

KINDS: Final = ("rl", "sft", "dpo", "reward_model")
SECTIONS: Final = {
    "rl": ("optimizer", "sft"),
    "sft": ("sft",),
    "dpo": ("dpo",),
    "reward_model": ("reward_model",),
}
"""Where the optimizers are that a run of each kind may use."""


def settings_of(tree: Mapping[str, Any]) -> PolicySettings:
    return validate(PolicySettings, tree)


def optimizer(section: str, **changes: Any) -> dict[str, Any]:
    return {"optimizer": changes} if section == "optimizer" else {section: {"optimizer": changes}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["qwen2", "qwen3_moe", "llama"])
def test_check_optimizers_accepts_defaults(tiny: Callable[..., Any], model: str, kind: Any) -> None:
    check_optimizers(tiny(model), PolicySettings(), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("section", ["optimizer", "sft", "dpo", "reward_model"])
@pytest.mark.parametrize("setting", [{"rates": {"q_prj": 0.1}}, {"no_decay": ["q_prj"]}])
def test_check_optimizers_unmatched_pattern_is_refused(
    tiny: Callable[..., Any], kind: Any, section: str, setting: dict[str, Any]
) -> None:
    settings = settings_of(optimizer(section, **setting))
    if section not in SECTIONS[kind]:
        check_optimizers(tiny(), settings, kind)
        return
    path = "policy.optimizer" if section == "optimizer" else f"policy.{section}.optimizer"
    with pytest.raises(ConfigError) as caught:
        check_optimizers(tiny(), settings, kind)
    assert f"{path}.{next(iter(setting))} has 'q_prj', which matches no trainable parameter" in str(caught.value)
    assert "q_proj" in str(caught.value)


def test_check_optimizers_pattern_of_frozen_parameters_is_refused(tiny: Callable[..., Any]) -> None:
    model, settings = tiny(), settings_of(optimizer("optimizer", rates={"embed": 0.1}))
    check_optimizers(model, settings, "rl")
    model.model.embed_tokens.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.rates has 'embed', which matches no trainable"):
        check_optimizers(model, settings, "rl")


def test_check_optimizers_knows_the_parameters_of_other_ranks(tiny: Callable[..., Any]) -> None:
    """A pattern of a stage's parameters is not refused on the ranks of the others."""
    settings = settings_of(optimizer("optimizer", rates={"elsewhere": 0.5}))
    check_optimizers(tiny(), settings, "rl", ["model.elsewhere.weight"])
    with pytest.raises(ConfigError, match="elsewhere"):
        check_optimizers(tiny(), settings, "rl")


def test_check_optimizers_frozen_model_is_refused(tiny: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="no trainable parameter: unfreeze"):
        check_optimizers(tiny().requires_grad_(False), PolicySettings(), "sft")


def test_check_optimizers_8bit_needs_torchao(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(optimizer("dpo", kind="adamw_8bit"))
    check_optimizers(tiny(), settings, "dpo")
    monkeypatch.delitem(sys.modules, "starling.policy.train.optim.adamw_8bit", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)  # what Python takes for a package that is not there
    with pytest.raises(ConfigError, match=r'policy\.dpo\.optimizer\.kind = "adamw_8bit" needs torchao .*: install'):
        check_optimizers(tiny(), settings, "dpo")
