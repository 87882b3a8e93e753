"""Checkouts of two states of the code, each with a Python environment that imports its members.

The environments take everything else from the installed one, so nothing is downloaded: each has the paths of its
members first, then the installed packages, and its own commands. Both sides lie beside each other and are compiled.
"""

from __future__ import annotations

import compileall
import io
import os
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAIN = ("origin/main", "main")
"""Names of the main branch, the first one that exists and is behind."""
MEASURED = ("libs/", "services/", "bench/controller", "bench/wire.py", "bench/check_", "constraints")
"""Beginnings of the paths of files that the quick benches run."""


@dataclass(frozen=True)
class Side:
    """A checkout with its environment."""

    name: str
    folder: Path

    @property
    def python(self) -> Path:
        """Return its interpreter."""
        return self.folder / ".venv" / "bin" / "python"


def git(*arguments: str) -> str | None:
    """Return what git prints; None if it fails, as in an archive without history."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def base_commit(wanted: str | None) -> str | None:
    """Return the commit that the change began from, or None where the history does not have it.

    It is `wanted` if that is given; else the last commit in common with the main branch; on the main branch itself the
    last commit if files differ from it, else its parent.
    """
    if wanted:
        return git("rev-parse", "--verify", f"{wanted}^{{commit}}")
    head = git("rev-parse", "HEAD")
    for main in MAIN:
        base = git("merge-base", main, "HEAD")
        if base is not None and base != head:
            return base
    return head if git("status", "--porcelain") else git("rev-parse", "--verify", "HEAD~1^{commit}")


def changed_files(base: str) -> list[str]:
    """Return the files that differ between a commit and the working tree."""
    changed = (git("diff", "--name-only", base) or "").splitlines()
    return changed + (git("ls-files", "--others", "--exclude-standard") or "").splitlines()


def is_measured(file: str) -> bool:
    """Say whether the quick benches run code of the file."""
    return file.startswith(MEASURED) and not file.endswith(".md")


def check_out(commit: str | None, folder: Path, name: str) -> Side:
    """Write the files of a commit, or those of the working tree if there is none, and make its environment.

    Both sides are made in the same way, from git's objects, so that they differ in nothing but the code.
    """
    folder.mkdir()
    archive = subprocess.run(
        ["git", "archive", commit or working_tree()], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    make_environment(folder)
    return Side(name, folder)


def working_tree() -> str:
    """Return a git tree of the files as they are, the new ones included; the index stays as it is."""
    with tempfile.TemporaryDirectory(prefix="starling-index-") as folder:
        environment = {**os.environ, "GIT_INDEX_FILE": str(Path(folder) / "index")}
        for command in (("read-tree", "HEAD"), ("add", "--all"), ("write-tree",)):
            done = subprocess.run(
                ["git", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
            )
    return done.stdout.strip()


def make_environment(checkout: Path) -> None:
    """Make `.venv` in a checkout: its members, the packages that this interpreter has, and the members' commands."""
    environment = checkout / ".venv"
    venv.create(environment, symlinks=True, with_pip=False)
    members = sorted(
        path.parent for group in ("libs", "services") for path in checkout.glob(f"{group}/*/pyproject.toml")
    )
    installed = Path(sysconfig.get_path("purelib"))
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    # Read in alphabetical order: the paths come first, because the lines of other packages import from them.
    (packages / "0_checkout.pth").write_text("".join(f"{path}\n" for path in [*members, installed]))
    for file in installed.glob("*.pth"):
        if "starling" not in file.name:
            shutil.copy(file, packages)
    for member in members:
        scripts = tomllib.loads((member / "pyproject.toml").read_text())["project"].get("scripts", {})
        for name, target in scripts.items():
            module, function = target.split(":")
            script = environment / "bin" / name
            call = (
                f'if __name__ == "__main__":\n    sys.exit({function}())\n'  # started processes import the script too
            )
            script.write_text(f"#!{environment}/bin/python\nimport sys\nfrom {module} import {function}\n\n{call}")
            script.chmod(0o755)
    for compiled in (*members, checkout / "bench"):
        if not compileall.compile_dir(compiled, quiet=2):
            raise SystemExit(f"{compiled} does not compile")
