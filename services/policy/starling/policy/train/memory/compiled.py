"""Compiled transformer blocks (`torch.compile`), with a cache of compiled code that outlives the process.

The first step of a process compiles, which takes minutes. torch keeps the result in a folder, by default one of a
guessable name under /tmp: it is gone after a reboot, and another user of the machine could be the first to make it, and
fill it with code. So it is a folder of the user.
"""

from __future__ import annotations

import shutil
from typing import Any, Final

import torch

from starling.common.errors import ConfigError
from starling.common.settings import environment_variables, set_variable, user_cache
from starling.policy.train.memory.blocks import find_blocks, use_compiled

CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Variable with which torch is given the folder."""


def compile_blocks(model: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile each block of `model`, in place: its tensors keep their names.

    Blocks and not the whole model: all blocks share one compiled code. The sizes of microbatches vary from step to
    step, so the code is made for any size at once; else the second size would be compiled again. Recomputation of
    blocks is not part of the code: call this after `checkpoint_blocks`.

    Raises:
        ConfigError: the folder of compiled code cannot be made.
    """
    _keep_code()
    compiled = dict[type, Any]()
    for block in find_blocks(model):
        kind = type(block)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, backend=backend, dynamic=True)
        use_compiled(block, compiled[kind])


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError unless there is a compiler for `device`: on a CPU, one for C++."""
    compiler = environment_variables(["CXX"]).get("CXX") or "g++"
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"policy.memory.compile = true needs a C++ compiler on a CPU, and there is no {compiler}: install it, give "
            "another in the variable CXX, or remove the setting"
        )


def _keep_code() -> None:
    """Let torch keep compiled code in a folder of this user, unless the environment has chosen one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Importing torch's compiler sets the variable to its own folder.
    if environment_variables([CACHE]).get(CACHE, default_cache_dir()) != default_cache_dir():
        return
    folder = user_cache("compiled")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"policy.memory.compile = true keeps compiled code in {folder}, which cannot be made "
            f"({error.strerror}): give another folder in the variable {CACHE}"
        ) from error
    set_variable(CACHE, str(folder))
