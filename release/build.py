"""A release: wheels and sdists of all members, checked, installed and run, with a bill of materials and checksums.

usage: python release/build.py [--out FOLDER] [--no-install]

1. All members have the version of release/version.txt, and CHANGELOG.md has a section for it.
2. Wheels and sdists are built twice, in different folders and with different permissions for new files: the bytes are
   equal. Their times are that of the last commit, or of SOURCE_DATE_EPOCH.
3. `twine check --strict` reads their metadata.
4. An empty environment gets the wheels, with the versions of constraints.txt; `starling smoke` runs there.
5. cyclonedx-py writes what that environment has (CycloneDX 1.6, validated), and SHA256SUMS lists all files.

The environment of this script has what release/requirements.txt names. With --no-install 4 and the bill are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from members import ROOT, ReleaseError, version
from sources import META, copy_sources

BIN = Path(sys.executable).parent
BILL = "starling.cdx.json"
SMOKE_S = 1800


def main() -> int:
    """Make a release. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Make a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files, which is emptied before")
    parser.add_argument("--no-install", action="store_true", help="neither install the wheels nor write the bill")
    options = parser.parse_args()
    try:
        release(options.out.absolute(), installs=not options.no_install)
    except (ReleaseError, subprocess.SubprocessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def release(out: Path, *, installs: bool) -> None:
    """Write the files of a release into `out`. Raises ReleaseError, or SubprocessError where a tool has failed."""
    number = version()
    check_changelog(number)
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or run(["git", "log", "-1", "--format=%ct"]).strip()
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        members = copy_sources(work / "first", number)
        copy_private(work / "first", work / "the second")
        build(work / "first", out, members, epoch)
        build(work / "the second", work / "again", members, epoch)
        check_equal(out, work / "again")
        say(f"built twice with equal bytes: {len(list(out.iterdir()))} files")
        files = sorted(map(str, out.iterdir()))
        run([str(BIN / "twine"), "check", "--strict", *files])
        say("twine accepts the metadata")
        if installs:
            install(work / "environment", out, number)
            smoke(work / "environment", work)
            write_bill(work / "environment", out, number, epoch, work / "the second/release" / META / "pyproject.toml")
    write_checksums(out)
    print(json.dumps({path.name: path.stat().st_size for path in sorted(out.iterdir())}, indent=1))


def check_changelog(number: str) -> None:
    """Raise ReleaseError if CHANGELOG.md has no section for a version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    if re.search(rf"^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE) is None:
        raise ReleaseError(f"CHANGELOG.md has no section `## [{number}] - YYYY-MM-DD`; rename that of [Unreleased]")


def copy_private(sources: Path, target: Path) -> None:
    """Copy the sources, as of a person whose files others cannot read, and with the time of the copy."""
    shutil.copytree(sources, target, copy_function=shutil.copyfile)
    for path in target.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def build(sources: Path, out: Path, members: list[str], epoch: str) -> None:
    """Build a wheel and an sdist of each member into `out`."""
    environment = {
        "HATCH": sys.executable, "OUT": str(out), "TARGETS": "sdist wheel", "MEMBERS": " ".join(members),
        "SOURCE_DATE_EPOCH": epoch,
    }  # fmt: skip
    run([str(ROOT / "deploy/images/build-wheels")], cwd=sources, environment=environment)


def check_equal(first: Path, second: Path) -> None:
    """Raise ReleaseError unless two folders have the same files with the same bytes."""
    differ = [name for name, digest in digests(first).items() if digests(second).get(name) != digest]
    if differ or digests(first).keys() != digests(second).keys():
        raise ReleaseError(f"two builds of the same sources differ: {', '.join(differ) or 'in their files'}")


def install(environment: Path, out: Path, number: str) -> None:
    """Make an environment with the wheels, all of whose other packages are those of constraints.txt."""
    uv, wheels = str(BIN / "uv"), sorted(map(str, out.glob("*.whl")))
    run([uv, "venv", "--quiet", "--python", sys.executable, str(environment)])
    pip = [uv, "pip", "install", "--quiet", "--python", str(environment / "bin/python")]
    links = os.environ.get("PIP_FIND_LINKS")
    torch = [] if links else ["--torch-backend=auto"]
    found = {"UV_FIND_LINKS": links} if links else {}
    run([*pip, *torch, "--constraint", "constraints.txt", *wheels], environment=found)
    # Again by their names: the paths of the wheels are not to stand in what is installed, nor in the bill.
    names = [f"{Path(wheel).name.split('-')[0].replace('_', '-')}=={number}" for wheel in wheels]
    run([*pip, "--no-index", "--find-links", str(out), "--no-deps", "--reinstall", "--compile-bytecode", *names])
    run([uv, "pip", "check", "--quiet", "--python", str(environment / "bin/python")])
    say(f"installed {len(wheels)} wheels in an empty environment")


def smoke(environment: Path, work: Path) -> None:
    """Run `starling smoke` of the environment, in an empty folder and without a checkout on its path."""
    folder = work / "smoke"
    folder.mkdir()
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STARLING_"))}
    inherited["STARLING_NETWORK__CONNECT_S"] = "900"  # a machine that builds releases may do other things, too
    python, command = environment / "bin/python", environment / "bin/starling"
    where = "import starling.cli.main, starling.sim; print(starling.cli.main.__file__)"
    found = run([str(python), "-c", where], cwd=folder, whole=inherited).strip()
    if not Path(found).is_relative_to(environment):
        raise ReleaseError(f"`starling` is imported from {found}, not from the environment of the wheels")
    last = run([str(command), "smoke"], cwd=folder, whole=inherited, timeout_s=SMOKE_S).strip().splitlines()[-1:]
    say(f"starling smoke: {' '.join(last)}")


def write_bill(environment: Path, out: Path, number: str, epoch: str, manifest: Path) -> None:
    """Write the bill of materials of the environment, and check that it has the members and no paths."""
    bill = out / BILL
    run(
        [
            str(BIN / "cyclonedx-py"), "environment", str(environment / "bin/python"), "--pyproject", str(manifest),
            "--spec-version", "1.6", "--output-format", "JSON", "--output-reproducible", "--validate",
            "--output-file", str(bill),
        ],
        environment={"SOURCE_DATE_EPOCH": epoch},
    )  # fmt: skip
    text = bill.read_text()
    components = {one["name"]: one["version"] for one in json.loads(text)["components"]}
    lacking = [name for name in _members(out) if components.get(name) != number and name != META]
    if lacking or "file://" in text:
        raise ReleaseError(f"{BILL} lacks {', '.join(lacking)}" if lacking else f"{BILL} has paths of this machine")
    say(f"{BILL} has {len(components)} packages")


def _members(out: Path) -> Iterator[str]:
    return (path.name.split("-")[0].replace("_", "-") for path in out.glob("*.whl"))


def write_checksums(out: Path) -> None:
    """Write SHA256SUMS, which `sha256sum --check` reads."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests(out).items())]
    (out / "SHA256SUMS").write_text("".join(lines))


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def run(
    command: list[str],
    *,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    whole: dict[str, str] | None = None,
    timeout_s: float = 3600,
) -> str:
    """Run a program and return its output. Raises ReleaseError, with the end of what it has printed, where it fails.

    `environment` is added to that of this process, `whole` replaces it.
    """
    variables: dict[str, Any] = whole if whole is not None else {**os.environ, **(environment or {})}
    done = subprocess.run(
        command, cwd=cwd, env=variables, text=True, timeout=timeout_s, capture_output=True, check=False
    )
    if done.returncode != 0:
        shown = f"{done.stdout}{done.stderr}".strip()[-3000:]
        raise ReleaseError(f"{Path(command[0]).name} {' '.join(command[1:3])} failed ({done.returncode}):\n{shown}")
    return done.stdout


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
