"""Folders of runs for the tests of the dashboard: long, with hostile texts, and with an image and a video."""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from small_recipe import SMALL_RUN

BEGUN = 1_760_000_000.0
HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>\u202e\u0007'
"""A completion that would run as a script where a page takes text for markup."""
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
RECIPE = f"""{SMALL_RUN}
[run]
name = "live"

[launch]
screen = "plain"

[evaluation]
at_start = false
at_end = false

[[reward.scorers]]
name = "prefix_match"
"""
ROLLOUTS = 4
MANY_TOKENS = 4000
NUM_FRAMES = 5
PROMPT = "Three apples cost 6 euros. What does one cost?"


def write_run(parent: Path, num_steps: int, *, seed: int = 0, attempt: int = 1) -> Path:
    """Write the files that a controller leaves of a run of `num_steps` steps. Returns the folder of the attempt."""
    folder = parent / f"attempt-{attempt}"
    folder.mkdir(parents=True)
    random.seed(seed)
    with (folder / "metrics.jsonl").open("w") as file:
        for line in lines(num_steps):
            file.write(json.dumps(line) + "\n")
    media = folder.parent / "pixel.png"
    media.write_bytes(PNG)
    clip = folder.parent / "clip"
    clip.mkdir()
    for number in range(NUM_FRAMES):
        (clip / f"{number:03}.png").write_bytes(PNG)
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(1, num_steps + 1, max(1, num_steps // 500)):
            for row in samples(step, media, is_long=step + max(1, num_steps // 500) > num_steps):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    rate = 3e-4 + seed * 1e-4
    recipe = f'[run]\nname = "{parent.name}"\n[rl]\nnum_steps = {num_steps}\n'
    (folder / "recipe.toml").write_text(f"{recipe}[policy.optimizer]\nlearning_rate = {rate}\n")
    (folder / "config.toml").write_text('[run]\nid = "x"\n[network]\ncurve = false\n')
    return folder


def lines(num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl."""
    rollouts = [(f"rollout-{number}", "rollout") for number in range(ROLLOUTS)]
    for number, (name, role) in enumerate([("policy-0", "policy"), *rollouts, ("reward-0", "reward")]):
        yield joined_line(BEGUN, name, role, number)
    for step in range(1, num_steps + 1):
        time = BEGUN + 6.0 * step
        progress = 1 - math.exp(-3.0 * step / num_steps)
        yield step_line(time, step, progress)
        yield {"time": time, "kind": "published", "version": step, "publish_s": 0.21, "offer_s": 0.4}
        for rollout in range(ROLLOUTS):
            yield adopted_line(time + 0.9 + 0.4 * rollout, rollout, step)
        if step % max(1, num_steps // 20) == 0:
            yield {"time": time, "kind": "evaluation", "version": step, "cause": "every", "num_prompts": 64,
                   "num_failed": 0, "reward_mean": progress * 0.75, "pass_at_k": progress, "k": 4}  # fmt: skip
        if step % max(1, num_steps // 7) == 0:
            yield {"time": time, "kind": "left", "replica": "rollout-3", "reason": "no heartbeat for 10 s",
                   "num_leases": 3}  # fmt: skip
            yield joined_line(time + 2, "rollout-3", "rollout", 4)
            yield {"time": time, "kind": "failed", "because_of": "reward-0", "prompt": f"train/0/{step}", "tries": 1,
                   "status": "reward_timeout", "reason": "the scorer math took longer than 10 s"}  # fmt: skip
        if step == num_steps // 2:
            yield {"time": time, "kind": "alarm", "step": step, "name": "clip", "value": 0.6, "bound": 0.5,
                   "text": "clip: clip_fraction is 0.6, above 0.5 for 3 steps"}  # fmt: skip
            yield {"time": time, "kind": "set", "key": "rl.max_staleness", "value": 2, "step": step}


def joined_line(time: float, name: str, role: str, number: int) -> dict[str, Any]:
    """Return the line of a replica that joins from one of three hosts."""
    host = f"node-{number % 3}"
    return {"time": time, "kind": "joined", "replica": name, "role": role, "host": host, "pid": number + 1}


def step_line(time: float, step: int, progress: float) -> dict[str, Any]:
    """Return the line of one optimizer step; `progress` grows from 0 to 1 over the run."""
    return {
        "time": time, "kind": "step", "step": step, "phase": "rl",
        "reward_mean": progress * 0.8 + random.gauss(0, 0.06), "reward_std": 0.3, "loss": random.gauss(0, 0.02),
        "entropy": 1.4 - progress + random.gauss(0, 0.03), "approx_kl": abs(random.gauss(0, 2e-4)),
        "mismatch_kl": abs(random.gauss(4e-4, 1e-4)), "grad_norm": abs(random.gauss(0.6, 0.15)),
        "learning_rate": 3e-4,
        "staleness_mean": 0.7, "staleness_max": 2, "staleness/0": 0.4, "staleness/1": 0.5, "staleness/2": 0.1,
        "completion_tokens_mean": 200 + 250 * progress + random.gauss(0, 12), "num_tokens": 25600.0,
        "time/step_s": 6.0,
        "time/wait_data_share": 0.2, "truncated_share": 0.05, "zero_advantage_share": 0.2, "tokens_per_s": 4200.0,
    }  # fmt: skip


def adopted_line(time: float, rollout: int, version: int) -> dict[str, Any]:
    """Return the line of a rollout that adopts a version, from the policy or from a rollout that has it."""
    return {
        "time": time, "kind": "adopted", "replica": f"rollout-{rollout}", "version": version, "attested": True,
        "source": "policy-0" if rollout < 2 else f"rollout-{rollout - 2}", "pull_s": 0.55, "pause_s": 0.08,
        "size_bytes": 1_240_000_000, "sent_bytes": 310_000_000, "transport": "ucx",
    }  # fmt: skip


def samples(step: int, media: Path, *, is_long: bool) -> Iterator[dict[str, Any]]:
    """Yield rows of samples.jsonl, the first one with `MANY_TOKENS` tokens if it `is_long`."""
    shown = [{"kind": "image", "uri": str(media)}, {"kind": "video", "uri": str(media.parent / "clip")}]
    for number in range(3):
        words = ["Three", " apples", " cost", " 6", " euros", ",", " so", " one", " costs", " 2", ".", " \\boxed{2}"]
        text = HOSTILE if number == 1 else "".join(words)
        times = MANY_TOKENS // len(words) + 1 if is_long and number == 0 else 1
        num = len(words) * times
        logprobs = [-0.02, -0.4, -0.9, -2.2, -0.1, -0.05, -1.2, -0.3, -0.7, -4.1, -0.01, -0.2] * times
        yield {
            "step": step, "prompt_id": f"train/0/{step * 3 + number}", "prompt": PROMPT,
            "completion": text, "reward": float(number != 1), "score/math": float(number != 1), "score/format": 0.5,
            "eval_score/helpful": 0.7, "status": "ok" if number else "truncated", "num_turns": 1, "num_tokens": num,
            "oldest_version": max(0, step - 2), "newest_version": step - 1, "token_ids": list(range(num)),
            "logprobs": logprobs, "versions": [[max(0, step - 2), 5], [step - 1, num - 5]],
            **({"media": shown} if number == 2 else {}),
        }  # fmt: skip
