"""Vision-language models from folders: policy and rollout load the same model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_vision import FAMILIES, make_config, make_model, write_folder
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from starling.algo.architecture import auto_class
from starling.policy.train.model.load import load_model, longest_sequence, outline, version_tensors
from starling.rollout.engine.embedded.model import build_model, live_tensors

torch.set_num_threads(1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_services_load_the_same_model(tmp_path: Path, family: str) -> None:
    write_folder(tmp_path, family)
    policy = version_tensors(load_model(tmp_path))
    rollout = live_tensors(build_model(tmp_path, dtype="float32", device="cpu", weights=True))
    empty = live_tensors(build_model(tmp_path, dtype="float32", device="cpu", weights=False))
    assert policy.keys() == rollout.keys() == empty.keys()
    assert any(".visual." in name for name in policy)
    assert "lm_head.weight" not in policy, "the output layer is tied"
    for name, parameter in make_model(family).named_parameters():
        assert torch.equal(policy[name], parameter)
        assert torch.equal(rollout[name], parameter)
        assert empty[name].shape == parameter.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_model_sizes_are_those_of_the_text_model(family: str) -> None:
    model = make_model(family)
    assert longest_sequence(model) == 512


@pytest.mark.parametrize("family", FAMILIES)
def test_outline_has_the_parameters_of_the_model(family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, family)
    described = {name: parameter.shape for name, parameter in outline(tmp_path).named_parameters()}
    assert described == {name: parameter.shape for name, parameter in make_model(family).named_parameters()}


@pytest.mark.campaign
def test_auto_class_is_that_of_the_mappings_for_every_configuration() -> None:
    """The oracle, `keys`, imports the configuration of every model; replicas must not."""
    mappings = [auto._model_mapping for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)]
    of_text, with_images = (set(mapping.keys()) for mapping in mappings)
    assert with_images - of_text
    for kind in of_text | with_images:
        expected = AutoModelForImageTextToText if kind in with_images - of_text else AutoModelForCausalLM
        assert auto_class(object.__new__(kind)) is expected, kind


@pytest.mark.campaign
def test_auto_class_imports_no_other_model() -> None:
    code = (
        "import sys\n"
        "from transformers import Qwen3Config\n"
        "from starling.algo.architecture import auto_class\n"
        "auto_class(Qwen3Config())\n"
        "assert 'transformers.models.gemma3' not in sys.modules, 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_auto_class_follows_the_configuration() -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config

    assert auto_class(Qwen3Config()) is AutoModelForCausalLM
    for family in FAMILIES:
        assert auto_class(make_config(family)) is AutoModelForImageTextToText
        assert auto_class(make_config(family).text_config) is AutoModelForCausalLM
    own = Qwen3Config()
    own.auto_map = {"AutoModelForImageTextToText": "modeling.Own"}
    assert auto_class(own) is AutoModelForImageTextToText
    own.auto_map["AutoModelForCausalLM"] = "modeling.OwnText"
    assert auto_class(own) is AutoModelForCausalLM
