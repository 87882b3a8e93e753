"""What the imports of the fork server leave out, and that it is there when something needs it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from starling.cli.run.lean_imports import Distributions

LIMIT_S = 300.0
LEFT_OUT = ("torch._dynamo", "torch.distributed.tensor", "sympy")
PRELOADED = f"""
import os
import sys

import starling.cli.run.preload

assert "transformers.modeling_utils" in sys.modules
LEFT_OUT = {LEFT_OUT!r}
assert not set(LEFT_OUT) & set(sys.modules), set(LEFT_OUT) & set(sys.modules)
"""
TRAINED = """
import pathlib
import torch
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.train.model.load import load_model
from starling.policy.train.optim.optimizer import ModelOptimizer
from starling.rollout.engine.embedded.model import build_model

folder = pathlib.Path(sys.argv[1])
model = load_model(folder)
optimizer = ModelOptimizer(model, OptimizerSettings(), 3)
model(torch.tensor([[3, 4, 5]])).logits.logsumexp(-1).sum().backward()
assert not optimizer.apply(1.0).skipped
build_model(folder, dtype="float32", device="cpu", weights=True)
assert not set(LEFT_OUT) & set(sys.modules), set(LEFT_OUT) & set(sys.modules)
os.write(1, b"trained")
"""
COMPILED = """
import torch
from transformers import masking_utils

assert "torch._dynamo" not in sys.modules


@torch.compiler.disable
def outside(x):
    assert not torch.compiler.is_compiling()
    return x + 1


@torch.compile(backend="eager")
def function(x):
    return outside(x * 2) * 3


assert function(torch.ones(2)).tolist() == [9.0, 9.0]
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
with masking_utils.TransformGetItemToIndex():
    picked = torch.func.vmap(lambda i: torch.arange(5)[i])(torch.tensor([3, 1]))
assert picked.tolist() == [3, 1]
from torch.distributed.tensor import DTensor
os.write(1, b"compiled")
"""
LIBRARY = """
import threading

from starling.weightsync.transports.ucx.worker import UcxWorker, _host_has_library

assert ("/libucx/lib/libucs.so" in open("/proc/self/maps").read()) is not _host_has_library()
assert threading.active_count() == 1
number = os.fork()
if number == 0:
    worker = UcxWorker(host="127.0.0.1")
    worker.progress(0.01)
    worker.close()
    os._exit(7)
os.write(1, b"%d" % os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
"""


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a saved model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 9, "head_dim": 8}
    config = AutoConfig.for_model("qwen3", num_attention_heads=2, num_key_value_heads=1, **sizes)
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.campaign
def test_model_is_loaded_and_trained_without_the_compiler(folder: Path) -> None:
    assert run(PRELOADED + TRAINED, str(folder)) == "trained"


def test_forks_inherit_the_library_of_ucx() -> None:
    pytest.importorskip("ucxx")
    assert run(PRELOADED + LIBRARY) == "7"


@pytest.mark.campaign
def test_compiler_and_distributed_tensors_work_after_the_lean_imports() -> None:
    assert run(PRELOADED + COMPILED) == "compiled"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["numpy", "torch", "PIL", "yaml", "google_nothing"])
def test_distributions_are_those_of_the_metadata(name: str) -> None:
    lean = Distributions(importlib.metadata.packages_distributions)
    assert lean.get(name, []) == sorted(set(importlib.metadata.packages_distributions().get(name, [])))


def test_distribution_with_the_name_of_its_module_needs_no_reading_of_all() -> None:
    def read_all() -> dict[str, list[str]]:
        raise AssertionError("it is slow")

    assert Distributions(read_all)["torch"] == ["torch"]
    with pytest.raises(KeyError):
        Distributions(read_all)["google_nothing"]
