"""Compiled blocks: the code that is kept, and what is missing for it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from starling.common.errors import ConfigError
from starling.policy.settings.memory import MemorySettings
from starling.policy.train.memory.compiled import CACHE, compile_blocks
from starling.policy.train.memory.setup import apply_memory_settings

torch.set_num_threads(1)


@pytest.fixture
def fresh_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of the user's caches, with nothing in it."""
    monkeypatch.setenv(CACHE, "")  # restores it afterwards
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def test_compiled_code_is_kept_in_a_folder_of_the_user(tiny: Callable[..., Any], fresh_environment: Path) -> None:
    compile_blocks(tiny())
    folder = fresh_environment / "starling" / "compiled"
    assert os.environ[CACHE] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folder_of_the_environment_is_used(
    tiny: Callable[..., Any], fresh_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, "/chosen")
    compile_blocks(tiny())
    assert os.environ[CACHE] == "/chosen"
    assert not fresh_environment.exists()


def test_folder_that_cannot_be_made_is_named(tiny: Callable[..., Any], fresh_environment: Path) -> None:
    fresh_environment.write_text("a file")
    with pytest.raises(ConfigError, match=rf"starling/compiled, which cannot be made \(Not a .*: give .*{CACHE}"):
        compile_blocks(tiny())


def test_missing_compiler_is_named(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler on a CPU, and there is no no-such-compiler"):
        apply_memory_settings(tiny(), MemorySettings(compile=True))


def test_compiled_blocks_are_not_selective() -> None:
    with pytest.raises(ValueError, match=r'compile = true with .* "selective": .* set checkpointing = "full"'):
        MemorySettings(compile=True, checkpointing="selective")


@pytest.mark.campaign
def test_compiled_gradients_are_those_of_the_model_and_the_code_is_kept(
    tiny: Callable[..., Any], fresh_environment: Path
) -> None:
    ids = torch.arange(48)[None] % 31
    for kept in (False, True):  # the second time as a process that starts again
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, plain = tiny(num_hidden_layers=1), tiny(num_hidden_layers=1)
        apply_memory_settings(model, MemorySettings(compile=True, checkpointing="full"))
        for one in (model, plain):
            one(input_ids=ids, use_cache=False).logits.square().mean().backward()
        for (name, found), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert (found.grad - expected.grad).norm() <= 1e-5 * expected.grad.norm(), name
        counts = torch._dynamo.utils.counters["aot_autograd"]
        hits, misses = counts["autograd_cache_hit"], counts["autograd_cache_miss"]
        assert (hits > 0, misses > 0) == (kept, not kept), counts
    assert any((fresh_environment / "starling" / "compiled").iterdir())
