"""A reward replica of a run whose scorer asks a second, real reward service over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_hub import FakeHub
from replica_processes import exit_code, replica
from reward_processes import run_service

from starling.common.wire import messages as wire

TOKEN = "the-token-of-the-test"
SCORERS = """
class Longest:
    scope = "groupwise"

    def score(self, batch):
        longest = max(map(len, batch.completions))
        return {"score": [float(len(one) == longest) for one in batch.completions]}

class Mean:
    media = "latents"
    keys = ("mean",)

    def score(self, batch):
        return {"mean": [float(one.mean()) for one in batch.latents]}

def known(completion, reference, prompt_text, metadata):
    if completion == "raise":
        raise RuntimeError("no such word")
    return float(reference in completion) + metadata["bonus"]
"""
ELSEWHERE = """
[[reward.scorers]]
name = "{folder}/elsewhere.py:Longest"
label = "longest"
weight = 0.5
tasks = ["text"]

[[reward.scorers]]
name = "{folder}/elsewhere.py:known"
label = "known"
tasks = ["text"]

[[reward.scorers]]
name = "{folder}/elsewhere.py:Mean"
label = "mean"
tasks = ["latent"]

[reward.http]
enabled = true
port = {port}
"""
REPLICA = """
[diffusion]
num_steps = 4

[[reward.scorers]]
name = "service"
key = "score"
timeout_s = 60.0
options = {{ url = "http://127.0.0.1:{port}{path}", {options} }}
needs = {{ network = true, {needs} }}
"""


def elsewhere(folder: Path, port: int = 0) -> str:
    """Write the scorers of the second service; return its recipe."""
    folder.chmod(0o755)
    (folder / "elsewhere.py").write_text(SCORERS)
    return ELSEWHERE.format(folder=folder, port=port)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("elsewhere")
    with run_service(folder, elsewhere(folder), REMOTE_REWARD_TOKEN=TOKEN) as (_, port):
        yield port


def flags(folder: Path, port: int, options: str, *, path: str = "/v1/rewards", token: str = TOKEN) -> tuple[str, str]:
    """Write a recipe of a replica that reads its token from a file; return the flags of the replica."""
    folder.chmod(0o755)
    (folder / "token").write_text(f"{token}\n")
    (folder / "token").chmod(0o644)
    options = f'token_file = "{folder}/token", {options}'
    recipe = REPLICA.format(port=port, path=path, options=options, needs=f'paths = ["{folder}/token"]')
    (folder / "recipe.toml").write_text(recipe)
    return "--config", str(folder / "recipe.toml")


def group(hub: FakeHub, *texts: str, latents: np.ndarray | None = None) -> wire.ScoreGroup:
    completions = tuple(wire.CompletionText(text=text, status=wire.Status.OK, num_tokens=3) for text in texts)
    metadata = {"task": "text" if latents is None else "latent", "bonus": 0.25}
    prompt = wire.Prompt(id="train/0/0", text="a cat", reference="cat", metadata=metadata)
    tensors: tuple[wire.TensorMeta, ...] = ()
    if latents is not None:
        name = latents.dtype.name
        tensors = (wire.TensorMeta(dtype=name, shape=latents.shape, nbytes=latents.nbytes, name="latents"),)
    return wire.ScoreGroup(lease=hub.lease("score"), prompt=prompt, completions=completions, tensors=tensors)


def test_service_scores_the_texts_of_a_group_and_a_failure_is_no_zero(hub: FakeHub, tmp_path: Path, port: int) -> None:
    options = 'keys = ["score", "longest", "known"]'
    with replica(hub, "reward-0", tmp_path, *flags(tmp_path, port, options)) as reward:
        hub.hello("reward-0")
        scored, _ = hub.ask("reward-0", group(hub, "a cat", "dog", "a cat!"), wire.GroupScored)
        assert scored.problems == ()
        assert scored.rewards == (1.25, 0.25, 1.75)
        assert scored.components == {
            "service": scored.rewards,
            "service/score": scored.rewards,
            "service/longest": (0.0, 0.0, 1.0),
            "service/known": (1.25, 0.25, 1.25),
        }
        scored, _ = hub.ask("reward-0", group(hub, "cat", "raise"), wire.GroupScored)
        assert scored.rewards == (1.25, None)
        assert scored.statuses == (wire.Status.OK, wire.Status.REWARD_ERROR)
        assert scored.components["service/longest"] == (0.0, 1.0)
        (problem,) = scored.problems
        assert problem.startswith("Completion 1: scorer 'service' gave no score: scorer 'known' raised RuntimeError")
        reward.terminate()
        assert exit_code(reward) == 0


@pytest.mark.parametrize(
    ("path", "functions"), [("/v1/rewards", ""), ("/api/reward/enqueue", '{ name = "mean", weight = 2.0 }')]
)
def test_service_scores_latents_over_either_protocol(
    hub: FakeHub, tmp_path: Path, port: int, path: str, functions: str
) -> None:
    images = np.stack([np.full((4, 2, 2), value, np.float16) for value in (10.0, -3.0)])
    options = f'media = "latents", keys = ["score", "mean"], functions = [{functions}]'
    with replica(hub, "reward-0", tmp_path, *flags(tmp_path, port, options, path=path)) as reward:
        hub.hello("reward-0")
        message = group(hub, "", "", latents=images)
        scored, _ = hub.ask("reward-0", message, wire.GroupScored, (images.tobytes(),))
        assert scored.problems == ()
        assert scored.rewards == ((20.0, -6.0) if functions else (10.0, -3.0))
        assert scored.components["service/mean"] == (10.0, -3.0)
        not_finite = np.full((1, 4, 2, 2), np.nan, np.float32)
        message = group(hub, "", latents=not_finite)
        scored, _ = hub.ask("reward-0", message, wire.GroupScored, (not_finite.tobytes(),))
        assert scored.statuses == (wire.Status.REWARD_ERROR,)
        assert "its latents have NaN or infinities, and were not sent" in scored.problems[0]
        reward.terminate()
        assert exit_code(reward) == 0


def test_replica_goes_on_while_the_service_is_down_and_scores_once_it_is_there(hub: FakeHub, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with replica(hub, "reward-0", tmp_path, *flags(tmp_path, port, "retries = 1")) as reward:
        hub.hello("reward-0")
        for _ in range(2):
            scored, _ = hub.ask("reward-0", group(hub, "a cat", "dog"), wire.GroupScored)
            assert scored.statuses == (wire.Status.REWARD_ERROR,) * 2
            assert scored.rewards == (None, None)
            (problem,) = scored.problems
            assert problem.startswith("All 2 completions: scorer 'service' gave no score: http://127.0.0.1")
            assert f":{port}/v1/rewards did not answer: " in problem
            assert problem.endswith("this was the last of 2 tries.")
        with run_service(folder, elsewhere(folder, port), REMOTE_REWARD_TOKEN=TOKEN):
            scored, _ = hub.ask("reward-0", group(hub, "a cat", "dog"), wire.GroupScored)
            assert scored.rewards == (1.75, 0.25)
        reward.terminate()
        assert exit_code(reward) == 0


def test_wrong_token_is_one_sentence(hub: FakeHub, tmp_path: Path, port: int) -> None:
    with replica(hub, "reward-0", tmp_path, *flags(tmp_path, port, "retries = 1", token=f"not-{TOKEN}")) as reward:
        hub.hello("reward-0")
        scored, _ = hub.ask("reward-0", group(hub, "a cat"), wire.GroupScored)
        assert scored.statuses == (wire.Status.REWARD_ERROR,)
        (problem,) = scored.problems
        assert f"POST http://127.0.0.1:{port}/v1/rewards was refused with status 401: " in problem
        assert problem.endswith("set REMOTE_REWARD_TOKEN to the token of the service.")
        assert TOKEN not in problem
        reward.terminate()
        assert exit_code(reward) == 0


def test_token_and_url_come_from_variables_that_are_declared(
    hub: FakeHub, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", TOKEN)
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", f"http://127.0.0.1:{port}")
    needs = 'network = true, variables = ["REMOTE_REWARD_TOKEN", "REMOTE_REWARD_ENQUEUE_URL"]'
    keys = 'options = { keys = ["score", "beauty"] }\nkey = "score"'
    recipe = f'[[reward.scorers]]\nname = "service"\n{keys}\ntimeout_s = 60.0\nneeds = {{ {needs} }}\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    with replica(hub, "reward-0", tmp_path, "--config", str(tmp_path / "recipe.toml"), fresh=True) as reward:
        hub.hello("reward-0")
        scored, _ = hub.ask("reward-0", group(hub, "a cat"), wire.GroupScored)
        assert scored.rewards == (1.75,)
        assert scored.components["service/beauty"] == (None,)
        reward.terminate()
        assert exit_code(reward) == 0
    recipe = recipe.replace('key = "score"', 'key = "beauty"')
    (tmp_path / "recipe.toml").write_text(recipe)
    with replica(hub, "reward-1", tmp_path, "--config", str(tmp_path / "recipe.toml"), fresh=True) as reward:
        hub.hello("reward-1")
        scored, _ = hub.ask("reward-1", group(hub, "a cat"), wire.GroupScored)
        assert scored.statuses == (wire.Status.REWARD_ERROR,)
        assert scored.problems[0].endswith("the service has no score 'beauty'; it has known, longest, mean.")
        reward.terminate()
        assert exit_code(reward) == 0
