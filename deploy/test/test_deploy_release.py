"""A release: `make release`, and what people do with its files."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 3600
EXTRAS = "media,models,s3,tensorboard,wandb,trackio,verifiers,lm-eval,liger,low-precision"


def run(*command: str, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    print(done.stdout[-4000:])
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a release, which `make release` builds twice, installs in an empty environment, and runs."""
    out = tmp_path_factory.mktemp("release") / "dist"
    printed = run("make", "--no-print-directory", "release", f"OUT={out}")
    for words in ("built twice with equal bytes", "twine accepts", "in an empty environment", "starling smoke: "):
        assert words in printed
    return out


@pytest.mark.timeout(PATIENCE_S)
def test_release_has_wheels_and_sdists_with_checksums(dist: Path) -> None:
    names = {path.name for path in dist.iterdir()}
    members = {path.parent.name for path in ROOT.glob("[ls]*/*/pyproject.toml")} | {"rl"}
    number = (ROOT / "release/version.txt").read_text().strip()
    wheels = {f"starling_{name}-{number}-py3-none-any.whl" for name in members}
    sdists = {f"starling_{name}-{number}.tar.gz" for name in members}
    assert names == wheels | sdists | {"starling.cdx.json", "SHA256SUMS"}
    assert run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=dist).count(": OK") == len(names) - 1


def test_wheels_of_sdists_are_the_wheels_of_the_release(dist: Path, tmp_path: Path) -> None:
    number = (ROOT / "release/version.txt").read_text().strip()
    python = str(ROOT / ".venv-release/bin/python")
    for name in ("common", "cli", "rl"):
        with tarfile.open(dist / f"starling_{name}-{number}.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
            epoch = str(max(int(member.mtime) for member in archive.getmembers()))
        folder = tmp_path / f"starling_{name}-{number}"
        build = (python, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "out"))
        run(*build, cwd=folder, environment={"SOURCE_DATE_EPOCH": epoch})
        wheel = f"starling_{name}-{number}-py3-none-any.whl"
        assert (tmp_path / "out" / wheel).read_bytes() == (dist / wheel).read_bytes()


def test_bill_lists_members_and_packages_without_paths(dist: Path) -> None:
    text = (dist / "starling.cdx.json").read_text()
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "starling-rl"
    components = {one["name"].lower(): one for one in bill["components"]}
    assert {"starling-common", "starling-policy", "torch", "transformers", "pyzmq", "msgspec"} <= set(components)
    assert "file://" not in text


@pytest.mark.timeout(PATIENCE_S)
def test_extras_of_starling_rl_can_be_installed(dist: Path) -> None:
    """Resolved only: together they are some gigabytes."""
    uv, links = str(ROOT / ".venv-release/bin/uv"), os.environ.get("PIP_FIND_LINKS")
    number = (ROOT / "release/version.txt").read_text().strip()
    command = [uv, "pip", "compile", "--quiet", "--find-links", str(dist), "--constraint", "constraints.txt"]
    command += ["--overrides", "overrides.txt", "--no-header", "--no-annotate", "-"]
    command += ["--find-links", links] if links else ["--torch-backend=cpu"]  # a flag hides UV_FIND_LINKS
    done = subprocess.run(
        command, cwd=ROOT, input=f"starling-rl[{EXTRAS}]=={number}\n", capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    resolved = {line.partition("==")[0] for line in done.stdout.splitlines()}
    assert {"starling-cli", "diffusers", "s3fs", "tensorboard", "wandb", "trackio", "lm-eval", "torchao"} <= resolved


@pytest.mark.parametrize(
    ("member", "extras"),
    [
        ("services/policy", ()),
        ("services/rollout", ("vllm",)),
        ("services/reward", ("media", "models")),
        ("libs/weightsync", ("ucx", "vllm")),
        ("libs/weightsync", ("ucx", "nixl")),
    ],
)
def test_members_can_be_installed_for_gpus(member: str, extras: tuple[str, ...], tmp_path: Path) -> None:
    """With the index's own torch, which is for CUDA, as the images of the variant `cuda` install it.

    vLLM pins a torch, whose CUDA bindings must be those of UCX.
    """
    torch = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    command = [str(ROOT / ".venv/bin/uv"), "pip", "compile", "--quiet", "--no-annotate", "--python-version", "3.11"]
    command += ["--python-platform", "x86_64-manylinux_2_31", "--constraint", "deploy/images/constraints.cuda.txt"]
    command += [part for extra in extras for part in ("--extra", extra)]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_FIND_LINKS")}
    done = subprocess.run(
        [*command, f"{member}/pyproject.toml"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert torch[0] in done.stdout.splitlines()
    assert "cuda-bindings==13" in done.stdout
