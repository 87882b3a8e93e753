"""Latents of a run's groups that a real reward replica gets over ZeroMQ: scored, decoded once, refused, and waiting."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from fake_hub import FakeHub
from replica_processes import exit_code, replica
from tiny_vae import decode, save_wan

from starling.common.wire import messages as wire

SCORERS = """
import time
import zlib

class FirstLatent:
    media = "latents"
    batch_size = 8

    def score(self, batch):
        while "hang" in batch.completions:
            time.sleep(3600.0)
        assert all(one.shape[1] == 1 for one in batch.latents)
        return {"score": [float(one.ravel()[0]) for one in batch.latents]}

class Digest:
    media = "pixels"

    def score(self, batch):
        return {"score": [float(zlib.crc32(one)) for one in batch.pixels]}
"""
DIFFUSION = "[diffusion]\nheight = 32\nwidth = 32\nnum_steps = 4\n"


def recipe(folder: Path, *scorers: str, more: str = "", diffusion: str = DIFFUSION) -> tuple[str, str]:
    """Write the scorers and a recipe with them; return the flags of a service that reads it."""
    folder.chmod(0o755)
    (folder / "scorers.py").write_text(SCORERS)
    tables = [
        f'[[reward.scorers]]\nname = "{folder}/scorers.py:{one}"\nlabel = "{one}"\nretries = 0\n' for one in scorers
    ]
    (folder / "recipe.toml").write_text(f"{diffusion}[reward]\nnum_workers = 1\n{more}\n{''.join(tables)}")
    return "--config", str(folder / "recipe.toml")


def group(hub: FakeHub, latents: np.ndarray, *texts: str, num: int = 0, dtype: str = "") -> wire.ScoreGroup:
    """Return the group of these latents; `num` completions, if not one for each."""
    texts = texts or ("",) * (num or len(latents))
    completions = tuple(wire.CompletionText(text=text, status=wire.Status.OK, num_tokens=3) for text in texts)
    meta = wire.TensorMeta(
        dtype=dtype or latents.dtype.name, shape=latents.shape, nbytes=latents.nbytes, name="latents"
    )
    prompt = wire.Prompt(id="train/0/0", text="a cat")
    return wire.ScoreGroup(lease=hub.lease("score"), prompt=prompt, completions=completions, tensors=(meta,))


def test_latents_are_scored_and_decoded_for_scorers_of_pixels(hub: FakeHub, tmp_path: Path) -> None:
    vae = save_wan(tmp_path / "vae")
    decoder = f'timeout_s = 90.0\n[reward.decoder]\nfolders = ["{tmp_path}/vae"]\nbatch_size = 2'
    images = np.random.default_rng(0).standard_normal((2, 16, 4, 4)).astype(np.float16)
    pixels = decode(vae, images.astype(np.float32)[:, :, None])
    with replica(hub, "reward-0", tmp_path, *recipe(tmp_path, "FirstLatent", "Digest", more=decoder)) as reward:
        hub.hello("reward-0")
        message = group(hub, images)
        scored, _ = hub.ask("reward-0", message, wire.GroupScored, (images.tobytes(),))
        reward.terminate()
        assert exit_code(reward) == 0
    assert scored.problems == ()
    assert scored.statuses == (wire.Status.OK,) * 2
    assert scored.components == {
        "FirstLatent": tuple(float(one.ravel()[0]) for one in images),
        "Digest": tuple(float(zlib.crc32(one)) for one in pixels),
    }


def test_wrong_latents_are_answered_and_the_replica_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    latents = np.arange(32, dtype=np.float32).reshape(2, 1, 4, 4)
    with replica(hub, "reward-0", tmp_path, *recipe(tmp_path, "FirstLatent")) as reward:
        hub.hello("reward-0")
        wrong = (
            (group(hub, latents, dtype="float16"), "came in 128 bytes, and float16[2, 1, 4, 4] takes 64"),
            (group(hub, latents, num=3), "has 3 completions and latents of 2"),
            (group(hub, latents, dtype="int32"), "dtype 'int32'"),
        )
        for message, problem in wrong:
            scored, _ = hub.ask("reward-0", message, wire.GroupScored, (latents.tobytes(),))
            assert set(scored.statuses) == {wire.Status.REWARD_ERROR}
            assert set(scored.rewards) == {None}
            (sentence,) = scored.problems
            assert problem in sentence
        scored, _ = hub.ask("reward-0", group(hub, latents), wire.GroupScored, (latents.tobytes(),))
        assert scored.rewards == (0.0, 16.0)
        bare = wire.ScoreGroup(lease=hub.lease("score"), prompt=wire.Prompt(id="p"), completions=scored_texts(1))
        scored, _ = hub.ask("reward-0", bare, wire.GroupScored)
        assert scored.statuses == (wire.Status.REWARD_ERROR,)
        assert "reads latents, and the completion has none" in scored.problems[0]
        reward.terminate()
        assert exit_code(reward) == 0


def scored_texts(num: int) -> tuple[wire.CompletionText, ...]:
    return (wire.CompletionText(text="a", status=wire.Status.OK, num_tokens=1),) * num


def test_group_waits_for_memory_that_another_has_and_one_too_large_fails(hub: FakeHub, tmp_path: Path) -> None:
    latents = np.full((1, 160, 32, 32), 7.0, np.float32)  # 640 KiB
    large = np.zeros((2, 160, 32, 32), np.float32)
    flags = recipe(tmp_path, "FirstLatent", more="max_media_mb = 1\ntimeout_s = 10.0")
    with replica(hub, "reward-0", tmp_path, *flags) as reward:
        hub.hello("reward-0")
        scored, _ = hub.ask("reward-0", group(hub, large), wire.GroupScored, (large.tobytes(),))
        assert scored.statuses == (wire.Status.REWARD_ERROR,) * 2
        assert "take 1 MiB, and reward.max_media_mb is 1; raise it" in scored.problems[0]
        first, second, given_up = group(hub, latents, "hang"), group(hub, latents), group(hub, latents)
        for message in (first, given_up, second):
            hub.send("reward-0", message, (latents.tobytes(),))
        status = hub.heartbeat("reward-0", lambda status: any("memory" in wait.what for wait in status.waits))
        (wait,) = (wait for wait in status.waits if "memory" in wait.what)
        assert wait.what.startswith("memory for the latents of ")
        assert wait.on == "reward.max_media_mb"
        hub.send("reward-0", wire.ReleaseLeases(leases=(given_up.lease,)))
        scored, _ = hub.answer("reward-0", first.lease, wire.GroupScored)
        assert scored.statuses == (wire.Status.REWARD_TIMEOUT,)
        scored, _ = hub.answer("reward-0", second.lease, wire.GroupScored)
        assert scored.rewards == (7.0,)
        reward.terminate()
        assert exit_code(reward) == 0


def test_run_without_diffusion_or_without_a_decoder_refuses_scorers_of_media(hub: FakeHub, tmp_path: Path) -> None:
    wrong = (
        ("FirstLatent", "", "reads latents, and the completions of a run are texts unless it has [diffusion]"),
        (
            "Digest",
            DIFFUSION,
            "reads pixels, and nothing decodes the latents of a run with [diffusion]: set",
        ),
    )
    for scorer, diffusion, problem in wrong:
        with replica(hub, "reward-0", tmp_path, *recipe(tmp_path, scorer, diffusion=diffusion)) as reward:
            _, output = reward.communicate(timeout=300.0)
            assert reward.returncode == 2
            assert problem in output
