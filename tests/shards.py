"""The test suite as a list of shards, each of which runs alone in at most some ten minutes on two cores.

`make test` runs the shards that prove behaviour, with some examples of each property test. `make test-all` adds the
campaigns (many seeds, many models, full chaos, and all examples of the property tests); after an interruption it
continues with the shards that are not green yet. `.ci/run` runs `make test`, then as many campaigns as fit its time:
those whose files a change touches, then those that ran longest ago.

A shard is *green* while no file that it depends on differs from those that it passed with. A test file depends on the
files that it imports, directly or not; a shard whose tests start services depends on all of `libs` and `services`.
Results are kept below `XDG_STATE_HOME`, outside of the checkout, so that another checkout of the same content finds
them.

usage: shards.py list | test | all | run NAME... | campaigns [--minutes N] [--base REF]
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = tuple(ROOT / parent / name for parent in ("libs", "services") for name in os.listdir(ROOT / parent))
"""Where `starling.*` is imported from."""
EVERYWHERE = ("pyproject.toml", "constraints.txt", "tests/conftest.py", "tests/shards.py")
"""Files that every shard depends on."""
MARGIN = 1.3
"""A shard starts only if this many times its usual duration is left."""


@dataclass(frozen=True)
class Shard:
    """One call of pytest."""

    name: str
    paths: tuple[str, ...]
    minutes: float
    """Usual duration on two cores."""
    campaign: bool = False
    """Runs the tests that are marked `campaign` and all examples of property tests, and is not part of `make test`."""
    services: bool = False
    """Its tests start services, so any file of theirs may matter."""
    workers: int = 2
    dist: str = "loadfile"
    """How tests are distributed: by file, as fixtures of a file are made once, or one by one where there are none."""
    environment: tuple[tuple[str, str], ...] = ()

    def command(self) -> list[str]:
        """Return the call of pytest."""
        marker = "campaign or hypothesis" if self.campaign else "not campaign"
        parallel = ["--numprocesses", str(self.workers), "--dist", self.dist] if self.workers > 1 else []
        return [sys.executable, "-m", "pytest", *parallel, "-m", marker, "--durations", "8", *self.paths]

    def variables(self) -> dict[str, str]:
        """Return the environment of the call."""
        profile = "full" if self.campaign else "quick"
        return {**os.environ, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": profile, **dict(self.environment)}


def _besides(folder: str, *parts: str) -> tuple[str, ...]:
    """Return the folders and test files in `folder` other than `parts`."""
    found = [path for path in sorted((ROOT / folder).iterdir()) if path.is_dir() or path.name.startswith("test_")]
    names = [f"{folder}/{path.name}" for path in found if path.name[0] not in "._"]
    return tuple(name for name in names if name not in parts)


_VLLM = (("TORCH_COMPILE_DISABLE", "1"),)
_ARCHITECTURES = "tests/vllm/test_architectures.py"
_STATES = "tests/parallel/test_mesh_states.py"
_CUTS = "tests/unit/power_cuts"
_WEIGHTSYNC = "tests/unit/weightsync"
_CHAOS = "tests/system/chaos"
_OF_SANDBOXES = tuple(f"tests/unit/{part}" for part in ("common", "reward", "rollout_api", "rollout_env"))
_OF_THE_POLICY = tuple(f"tests/unit/{part}" for part in ("algo", "policy", "vision"))
_OF_STEPS = tuple(f"tests/parallel/test_{axis}_steps.py" for axis in ("adapter", "context", "sharded", "tensor"))
_OF_STAGES = tuple(f"tests/parallel/test_{axis}_steps.py" for axis in ("expert", "pipeline"))

SHARDS = (
    Shard("unit", ("tests/unit", "tests/scenarios"), 6.5),
    Shard("processes", ("tests/processes",), 2.0, services=True, workers=3),
    Shard("sim", ("tests/sim",), 0.7),
    Shard("parallel", ("tests/parallel",), 1.9, dist="worksteal"),
    Shard("system", ("tests/system",), 5.0, services=True),
    Shard("vllm", ("tests/vllm",), 3.3, services=True, environment=_VLLM),
    Shard(
        "unit-campaign",
        (*_besides("tests/unit", _WEIGHTSYNC, _CUTS, *_OF_SANDBOXES, *_OF_THE_POLICY), "tests/scenarios"),
        10.0,
        campaign=True,
    ),
    Shard("sandboxes-campaign", _OF_SANDBOXES, 8.0, campaign=True),
    Shard("policy-campaign", _OF_THE_POLICY, 8.0, campaign=True),
    Shard("cuts-campaign", (_CUTS,), 8.0, campaign=True, dist="worksteal"),
    Shard("weightsync-campaign", (_WEIGHTSYNC,), 3.5, campaign=True),
    Shard("processes-campaign", ("tests/processes",), 1.0, campaign=True, services=True),
    Shard("sim-campaign", ("tests/sim",), 1.7, campaign=True),
    Shard("steps-campaign", _OF_STEPS, 6.7, campaign=True, dist="worksteal"),
    Shard("stages-campaign", _OF_STAGES, 4.0, campaign=True, dist="worksteal"),
    Shard("states-campaign", (_STATES,), 8.0, campaign=True, dist="worksteal"),
    Shard(
        "parallel-campaign",
        _besides("tests/parallel", *_OF_STEPS, *_OF_STAGES, _STATES),
        8.0,
        campaign=True,
        dist="worksteal",
    ),
    Shard("system-campaign", _besides("tests/system", _CHAOS), 8.0, campaign=True, services=True),
    Shard("chaos-campaign", (_CHAOS,), 6.5, campaign=True, services=True),
    Shard("architectures-campaign", (_ARCHITECTURES,), 7.0, True, True, dist="worksteal", environment=_VLLM),
    Shard("vllm-campaign", _besides("tests/vllm", _ARCHITECTURES), 10.0, True, True, environment=_VLLM),
)


@dataclass
class Result:
    """The last run of a shard that passed."""

    digest: str
    """Of the files that it depends on."""
    seconds: float
    ended: float
    """Wall clock, seconds since 1970."""


# --- what a shard depends on -----------------------------------------------------------------------------------------


@cache
def tracked_files() -> frozenset[str]:
    """Return the files of the checkout, ignored ones left out; without git, all but hidden and compiled ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):  # an archive, or a checkout of another user
        below = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        left_out = {"__pycache__", "runs", "build", "dist"}
        listed = [path.as_posix() for path in below if not any(p.startswith(".") or p in left_out for p in path.parts)]
    return frozenset(name for name in listed if (ROOT / name).is_file())


@cache
def helper_modules() -> dict[str, str]:
    """Return the files that tests import by bare name."""
    return {
        Path(name).stem: name for name in sorted(tracked_files()) if name.startswith("tests/") and name.endswith(".py")
    }


@cache
def imports_of(name: str) -> frozenset[str]:
    """Return the files of the checkout that a Python file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / name).read_bytes())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            found.update(_files_of(module))
    return frozenset(found)


def _files_of(module: str) -> list[str]:
    if module in helper_modules():
        return [helper_modules()[module]]
    if not module.startswith("starling."):
        return []
    path = module.replace(".", "/")
    places = [source / f"{path}{end}" for source in SOURCES for end in (".py", "/__init__.py")]
    return [place.relative_to(ROOT).as_posix() for place in places if place.is_file()]


def dependencies(shard: Shard) -> frozenset[str]:
    """Return every file whose change may change the shard's result."""
    below = tuple(f"{path}/" for path in shard.paths)
    if shard.services:
        below += ("libs/", "services/", "recipes/", "examples/", "bench/")
    found = {name for name in tracked_files() if name.startswith(below)}
    fixtures = {f"{folder}/conftest.py" for path in shard.paths for folder in Path(path).parents}
    found |= {*shard.paths, *fixtures, *EVERYWHERE} & tracked_files()
    queue = [name for name in found if name.endswith(".py")]
    while queue:
        new = {name for name in imports_of(queue.pop()) if name not in found}
        found |= new
        queue += new
    return frozenset(found)


def digest_of(names: frozenset[str]) -> str:
    """Return a digest of the names and contents of files."""
    total = hashlib.sha256()
    for name in sorted(names):
        total.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return total.hexdigest()


def changed_since(base: str) -> frozenset[str]:
    """Return the files that differ from commit `base`, or from the commit before this one if `base` is not known."""
    for ref in (base, "HEAD~1"):
        done = subprocess.run(["git", "diff", "--name-only", f"{ref}..."], cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip():
            return frozenset(done.stdout.split())
    return frozenset()


# --- results ---------------------------------------------------------------------------------------------------------


def results_file() -> Path:
    """Return the file of the results of all checkouts on this machine."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "starling" / "shards.json"


def read_results() -> dict[str, Result]:
    """Return the last result of each shard; none where the file is missing or damaged."""
    try:
        return {name: Result(**entry) for name, entry in json.loads(results_file().read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_result(name: str, result: Result) -> None:
    """Keep the result of a shard."""
    path = results_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {name: asdict(entry) for name, entry in (read_results() | {name: result}).items()}
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(entries, indent=1))
    beside.replace(path)


def is_green(shard: Shard, results: dict[str, Result]) -> bool:
    """Say whether the shard passed with the present content of its files."""
    return shard.name in results and results[shard.name].digest == digest_of(dependencies(shard))


# --- commands --------------------------------------------------------------------------------------------------------


def run(shard: Shard) -> bool:
    """Run a shard and keep its result."""
    digest, start = digest_of(dependencies(shard)), time.monotonic()
    print(f"\n=== {shard.name}: {shlex.join(shard.command()[2:])}", flush=True)
    done = subprocess.run(shard.command(), cwd=ROOT, env=shard.variables())
    seconds = time.monotonic() - start
    passed = done.returncode in (0, 5)  # 5: no test was selected
    print(f"=== {shard.name}: {'green' if passed else 'FAILED'} after {seconds:.0f} s", flush=True)
    if passed:
        write_result(shard.name, Result(digest, seconds, time.time()))
    return passed


def run_all(shards: tuple[Shard, ...]) -> bool:
    """Run shards one after another, also after one that failed; say at the end which did."""
    failed = [shard.name for shard in shards if not run(shard)]
    if failed:
        print(f"\nFAILED: {' '.join(failed)}. Run one alone: python tests/shards.py run {failed[0]}")
    return not failed


def run_campaigns(base: str, ends: float) -> bool:
    """Run the campaigns that fit the time until `ends` (monotonic): the touched ones first, then the oldest."""
    results, changed = read_results(), changed_since(base)
    count = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    campaigns = [shard for shard in SHARDS if shard.campaign and not is_green(shard, results)]
    first = int(count or 0) % max(1, len(campaigns))  # where no result is known, each commit begins with another one
    campaigns = campaigns[first:] + campaigns[:first]
    touched = {shard.name for shard in campaigns if changed & dependencies(shard)}
    ended = {name: result.ended for name, result in results.items()}
    skipped = []
    for shard in sorted(campaigns, key=lambda shard: (shard.name not in touched, ended.get(shard.name, 0.0))):
        usual = max(60 * shard.minutes, results[shard.name].seconds if shard.name in results else 0.0)
        if time.monotonic() + MARGIN * usual > ends:
            skipped.append(shard.name)
        elif not run(shard):
            return False
    print(f"\ncampaigns that did not fit the time: {' '.join(skipped) or 'none'}")
    return True


def show(shards: tuple[Shard, ...]) -> None:
    """Print each shard with its usual duration and its state."""
    results = read_results()
    for shard in shards:
        state = "green" if is_green(shard, results) else "to run"
        last = f"{results[shard.name].seconds:5.0f} s last" if shard.name in results else ""
        kind = "test-all" if shard.campaign else "test"
        print(f"{shard.name:22} {60 * shard.minutes:5.0f} s  {kind:9} {state:7} {last}")


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("list", "test", "all", "run", "campaigns"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="for `run`: names of shards")
    parser.add_argument("--minutes", type=float, default=30.0, help="for `campaigns`: time for all of them")
    parser.add_argument("--base", default="origin/main", help="for `campaigns`: commit that the change began from")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + 60 * options.minutes
    proofs = tuple(shard for shard in SHARDS if not shard.campaign)
    by_name = {shard.name: shard for shard in SHARDS}
    unknown = [name for name in options.names if name not in by_name]
    if unknown:
        parser.error(f"no shard {unknown[0]!r}; there are {', '.join(by_name)}")
    match options.command:
        case "list":
            show(SHARDS)
            return 0
        case "test":
            return 0 if run_all(proofs) else 1
        case "run":
            return 0 if run_all(tuple(by_name[name] for name in options.names)) else 1
        case "all":
            results = read_results()
            return 0 if run_all(tuple(shard for shard in SHARDS if not is_green(shard, results))) else 1
        case _:
            return 0 if run_campaigns(options.base, ends) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
