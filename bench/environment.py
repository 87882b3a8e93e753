"""Cached Python environments for the software that benchmarks compare with, in bench/.cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from figure import progress

CACHE = Path(__file__).resolve().parent / ".cache"


def environment_python(name: str, requirements: Path, *, torch: bool = False) -> Path:
    """Return the Python of environment `name`, which is created if it is missing or its requirements have changed.

    With `torch` the requirements include torch, installed as its CPU build, which only uv can select.
    """
    folder = CACHE / name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return python
    progress(f"making the environment {folder}")
    environment = dict(os.environ)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}")
    wheels = environment.get("PIP_FIND_LINKS")  # uv does not read pip's settings
    if uv is None and torch and wheels is None:
        raise SystemExit("uv is missing: install it, or put `uv` on the PATH")
    if uv is None:
        make = [sys.executable, "-m", "venv", "--clear", str(folder)]
        install = [str(python), "-m", "pip", "install", "--quiet"]
    else:
        make = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
        install = [uv, "pip", "install", "--quiet", "--python", str(python), "--compile-bytecode"]
        if wheels is not None:
            environment["UV_FIND_LINKS"] = wheels
        elif torch:
            install.append("--torch-backend=cpu")
    for command in (make, [*install, "--requirement", str(requirements)]):
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    stamp.write_text(requirements.read_text())
    return python
