"""Train tiny video models with a reward service of its own, and print how the held-out rewards rise: `make demo-world`.

    starling reward --config recipes/world/rewards.toml        HTTP on a free port of this machine, with a token
    starling run recipes/world/tiny-wan.toml                   once for each seed, and so on

Each run asks the service for its rewards. The script fails when one rises by less than it should.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
RISE = 0.3
"""What each held-out reward must rise by, at least."""
START_S = 120.0
RUN_S = 600.0


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe")
    parser.add_argument("--recipes", nargs="+", default=["tiny-wan", "tiny-cosmos"], help="names of recipes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    falls_short = False
    with reward_service(options.folder) as environment:
        print(f"{'recipe':<14}{'seed':>5}{'held-out reward':>22}{'rise':>9}{'seconds':>9}", flush=True)
        for recipe in options.recipes:
            for seed in range(options.seeds):
                began = time.monotonic()
                before, after = train(recipe, seed, options.folder, environment)
                seconds = time.monotonic() - began
                rewards = f"{before:.3f} -> {after:.3f}"
                print(f"{recipe:<14}{seed:>5}{rewards:>22}{after - before:>+9.3f}{seconds:>9.0f}", flush=True)
                falls_short |= after - before < RISE
    if falls_short:
        print(f"a reward rose by less than {RISE}", file=sys.stderr)
    return int(falls_short)


@contextmanager
def reward_service(folder: Path) -> Iterator[dict[str, str]]:
    """Start the reward service; yield the environment with which its clients find it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "REMOTE_REWARD_TOKEN": secrets.token_urlsafe(32),
        "REMOTE_REWARD_ENQUEUE_URL": f"{url}/v1/rewards",
    }
    command = [starling(), "reward", "--config", str(HERE / "rewards.toml"), "--reward.http.port", str(port)]
    with (folder / "rewards.log").open("wb") as log:
        service = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            await_ready(service, url, folder / "rewards.log")
            yield environment
        finally:
            service.terminate()
            service.wait(START_S)


def await_ready(service: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the service answers."""
    end = time.monotonic() + START_S
    while service.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=1.0):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the reward service does not answer:\n{log.read_text()}")


def train(recipe: str, seed: int, folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Run a recipe; return the held-out rewards before and after it."""
    name = f"{recipe}-{seed}-{time.strftime('%H%M%S')}"
    path = HERE / f"{recipe}.toml"
    flags = ["--run.name", name, "--run.seed", str(seed), "--run.folder", str(folder), "--launch.screen", "plain"]
    done = subprocess.run(
        [starling(), "run", str(path), *flags], env=environment, capture_output=True, text=True, timeout=RUN_S
    )
    if done.returncode:
        raise SystemExit(f"{path} failed:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    lines = (folder / name / "attempt-1" / "metrics.jsonl").read_text().splitlines()
    rewards = [line["reward_mean"] for line in map(json.loads, lines) if line["kind"] == "evaluation"]
    return rewards[0], rewards[-1]


def starling() -> str:
    """Return the command of the environment that runs this script."""
    return str(Path(sys.executable).with_name("starling"))


if __name__ == "__main__":
    sys.exit(main())
