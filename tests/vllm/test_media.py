"""Prompts with images and videos on vLLM: tokens, pixels and positions equal those of the embedded engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from adoptions import GROUP_SIZE, adopt_under_load, check
from engines import EngineDriver, PublisherProcess, engine_driver, publish_experts, publisher_process, spec_of
from tiny_vision import PIXELS, ask, image, make_config, make_encoder, make_tokenizer, write_video
from torch.nn.functional import linear

from starling.algo.architecture import placeholders
from starling.common.errors import ConfigError
from starling.common.wire.messages import Media, Prompt, Sampling
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult, PartialCompletion, RequestError
from starling.rollout.engine.multimodal.prompts import PromptEncoder
from starling.rollout.engine.vllm.engine import VllmEngine

HEAD = 32
"""The smallest head size that vLLM's CPU build supports."""
WORKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen2_vl on two": ("qwen2_vl", {"tensor_parallel_size": 2}),
    "qwen3_vl in two stages": ("qwen3_vl", {"pipeline_parallel_size": 2}),
    "qwen3_vl_moe on two": ("qwen3_vl_moe", {"tensor_parallel_size": 2}),
}
MAX_TOKENS = 80
NEAR_TIE = 1e-4
"""Difference of two experts' probabilities, between the last that is used and the next, that rounding may turn."""
"""Tokens of a completion under load."""
CAMPAIGN = ("qwen2_vl on two", "qwen3_vl in two stages", "qwen3_vl_moe on two")


def _param(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.campaign] if name in CAMPAIGN else [])


def sized(family: str) -> Any:
    """Return the configuration of a tiny model with heads large enough for vLLM, so four times as wide."""
    config = make_config(family, initializer_range=0.12)  # or rounding alone would exceed what is allowed
    text, vision = config.text_config, config.vision_config
    text.hidden_size = HEAD * text.num_attention_heads
    setattr(vision, "hidden_size" if family == "qwen2_vl" else "out_hidden_size", text.hidden_size)
    if family.startswith("qwen3"):
        text.head_dim = HEAD
    if family == "qwen3_vl_moe":
        text.moe_intermediate_size, text.norm_topk_prob = 32, True
    text.rope_parameters = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": family.startswith("qwen3"),
    }
    return config


def write_model(folder: Path, config: Any, seed: int) -> Any:
    """Write a model with its tokenizer and processors; return the model."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False)
    model.save_pretrained(folder)
    if config.model_type == "qwen3_vl_moe":
        publish_experts(folder / "model.safetensors")
    make_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return model


@dataclass(frozen=True)
class VisionEngine:
    """An engine, the models of its versions, and the encoder of its prompts."""

    driver: EngineDriver
    models: list[Any]
    publisher: PublisherProcess
    encoder: PromptEncoder
    video: str

    def ask_for(self, lease: str, prompt: Prompt, count: int = 2, **sampling: Any) -> GroupRequest:
        ids, tensors = self.encoder.encode(prompt)
        settings = Sampling(**{"max_tokens": 8, "temperature": 0.8, "seed": 4, **sampling})
        return GroupRequest(lease, ids, count, settings, tensors)

    def generate(self, *requests: GroupRequest) -> list[GroupResult]:
        for request in requests:
            self.driver.engine.add(request)
        return self.driver.finish(*(request.lease for request in requests))

    def check(self, request: GroupRequest, result: GroupResult, version: int = 0) -> None:
        """Compare every sampled token with a forward pass over the weights of `version`."""
        never = list(placeholders(self.models[0].config).values())
        for completion in result.completions:
            assert not np.isin(completion.token_ids, never).any()
            assert set(completion.versions.tolist()) == {version}
            wanted = forward_logprobs(self.models[version % 2], result, completion, request.sampling.temperature)
            np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


def forward_logprobs(
    model: Any, result: GroupResult, completion: Completion, temperature: float
) -> npt.NDArray[np.float32]:
    """Return the log-probabilities of sampled tokens by one forward pass of transformers, at the given positions."""
    sampled = torch.from_numpy(completion.token_ids).long()
    ids = torch.tensor([[*result.prompt_ids.tolist(), *sampled.tolist()]])
    inputs = {name: torch.from_numpy(array) for name, array in result.tensors.items()}
    if inputs:
        given = inputs["position_ids"].long()
        after = given[:, -1].max() + 1 + torch.arange(len(sampled))
        inputs["position_ids"] = torch.cat((given, after.repeat(3, 1)), 1)[:, None]
    logits = model(ids, **inputs).logits[0, len(result.prompt_ids) - 1 : -1]
    scaled = (logits / (temperature or 1.0)).log_softmax(-1)
    found: npt.NDArray[np.float32] = scaled.gather(-1, sampled[:, None])[:, 0].numpy()
    return found


def num_certain(model: Any, result: GroupResult, completion: Completion) -> int:
    """Return how many of a completion's tokens do not depend on how a router's near tie is rounded.

    Where two experts are as likely, another batch size may choose the other one, and all later tokens differ.
    """
    margins = []

    def note(router: Any, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
        likely = linear(inputs[0].reshape(-1, inputs[0].shape[-1]), router.weight).softmax(-1).sort(descending=True)[0]
        most = model.config.get_text_config().num_experts_per_tok
        margins.append(likely[:, most - 1] - likely[:, most])

    hooks = [part.register_forward_hook(note) for name, part in model.named_modules() if name.endswith("mlp.gate")]
    try:
        forward_logprobs(model, result, completion, 1.0)
    finally:
        for hook in hooks:
            hook.remove()
    if not margins:
        return len(completion.token_ids)
    near = (torch.stack(margins).amin(0) < NEAR_TIE).nonzero()
    # The token at position p is predicted from those before it.
    return len(completion.token_ids) if not len(near) else max(0, int(near[0]) + 1 - len(result.prompt_ids))


@pytest.fixture(scope="module", params=[_param(name) for name in WORKERS])
def vision_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisionEngine]:
    family, vllm = WORKERS[request.param]
    base = tmp_path_factory.mktemp("models")
    folders = [base / "0", base / "1"]
    models = [write_model(folder, sized(family), seed) for seed, folder in enumerate(folders)]
    with publisher_process(folders) as publisher, engine_driver(folders[0], load_weights=True, vllm=vllm) as engine:
        video = write_video(base / "video", 24, 16, 6)
        yield VisionEngine(engine, models, publisher, make_encoder(folders[0], models[0]), video)


def test_logprobs_equal_a_forward_pass(vision_engine: VisionEngine) -> None:
    slow = Media(kind="video", uri=vision_engine.video, fps=0.25)
    prompts = {
        "wide": ask("a<image>b?", image(40, 12)),
        "text": ask("bc"),
        "other pixels": ask("a<image>b?", image(40, 12, 7)),
        "several": ask("<image>a<video>b<image>", image(16, 16, 1), slow, image(20, 30, 2)),
        "slow": ask("<video>ab", slow),
        "fast": ask("<video>ab", replaced(slow, 4.0)),
        "greedy": ask("<image>", image(8, 32, 3)),
    }
    asked = [
        vision_engine.ask_for(name, prompt, temperature=0.0 if name == "greedy" else 0.8)
        for name, prompt in prompts.items()
    ]
    for request, result in zip(asked, vision_engine.generate(*asked), strict=True):
        vision_engine.check(request, result)
        assert result.tensors.keys() == request.tensors.keys()


def replaced(video: Media, fps: float) -> Media:
    return Media(kind=video.kind, uri=video.uri, fps=fps)


def test_placeholder_is_never_sampled(vision_engine: VisionEngine) -> None:
    request = vision_engine.ask_for("hot", ask("<image>a", image(16, 16)), count=16, max_tokens=24, temperature=2.0)
    (result,) = vision_engine.generate(request)
    vision_engine.check(request, result)


def test_interrupted_group_with_images_resumes(vision_engine: VisionEngine) -> None:
    request = vision_engine.ask_for(
        "whole", ask("<image>b<video>", image(12, 20, 5), Media(kind="video", uri=vision_engine.video))
    )
    (whole,) = vision_engine.generate(request)
    begun = tuple(PartialCompletion(c.token_ids[:3], c.logprobs[:3], c.versions[:3]) for c in whole.completions)
    again = replace(request, lease="rest", partial=begun)
    (result,) = vision_engine.generate(again)
    vision_engine.check(again, result)
    for completion, before in zip(result.completions, begun, strict=True):
        assert completion.token_ids[:3].tolist() == before.token_ids.tolist()
        assert len(completion.token_ids) == 8


def test_inconsistent_tensors_are_rejected(vision_engine: VisionEngine) -> None:
    request = vision_engine.ask_for("wrong", ask("<image>a", image(40, 12)))
    tensors = request.tensors
    for changed, sentence in (
        (
            {**tensors, "pixel_values": tensors["pixel_values"][:-1]},
            "39 rows of pixel_values came, and",
        ),
        ({**tensors, "position_ids": tensors["position_ids"][:, 1:]}, r"position_ids are \[3, \d+\] instead of"),
        (
            {name: array for name, array in tensors.items() if name != "position_ids"},
            "position_ids are none",
        ),
        ({name: array for name, array in tensors.items() if name != "image_grid_thw"}, "came without the other"),
    ):
        with pytest.raises(RequestError, match=sentence):
            vision_engine.driver.engine.add(replace(request, tensors=changed))
    assert not vision_engine.driver.engine.num_waiting


def test_adoption_discards_old_vision_outputs(vision_engine: VisionEngine) -> None:
    """Vision outputs of older weights are not reused, except under `keep`."""
    engine = vision_engine.driver.engine
    prompt = ask("<image>c", image(24, 24, 9))
    plan = vision_engine.publisher.plan(engine)
    for version, mode in ((1, "recompute"), (2, "salt"), (3, "salt")):
        vision_engine.publisher.pull(engine, plan, version)
        adopted = engine.adopt(mode)  # type: ignore[arg-type]
        assert (adopted.version, adopted.proven) == (version, True)
        request = vision_engine.ask_for(f"version {version}", prompt)
        (result,) = vision_engine.generate(request)
        vision_engine.check(request, result, version)


def test_adoptions_under_a_load_of_images(vision_engine: VisionEngine) -> None:
    engine, first = vision_engine.driver.engine, vision_engine.driver.engine.version + 1
    film = Media(kind="video", uri=vision_engine.video)
    prompts = [
        lambda seed: ask("a<image>b", image(24, 16, seed)),
        lambda seed: ask("abc" * (1 + seed % 3)),
        lambda seed: ask("<video>a<image>", film, image(16, 16, seed % 3)),
    ]

    def asked(lease: str, number: int) -> GroupRequest:
        prompt = prompts[number % len(prompts)](number)
        return vision_engine.ask_for(lease, prompt, GROUP_SIZE, max_tokens=MAX_TOKENS, temperature=1.0, seed=number)

    outcome = adopt_under_load(vision_engine.driver, vision_engine.publisher, 6, "recompute", first=first, ask=asked)
    check(outcome, engine.version, MAX_TOKENS)
    assert len({int(version) for r in outcome.results for c in r.completions for version in c.versions}) > 3
    num_compared = 0
    for result in outcome.results:
        for completion in result.completions:
            for parity in (0, 1):
                wanted = forward_logprobs(vision_engine.models[parity], result, completion, 1.0)
                mine = completion.versions % 2 == parity
                mine[num_certain(vision_engine.models[parity], result, completion) :] = False
                num_compared += int(mine.sum())
                np.testing.assert_allclose(completion.logprobs[mine], wanted[mine], atol=1e-4)
    assert num_compared > 0.5 * sum(len(c.token_ids) for r in outcome.results for c in r.completions)


def test_models_that_vllm_would_compute_differently_are_rejected(tmp_path: Path) -> None:
    experts, places = sized("qwen3_vl_moe"), sized("qwen3_vl")
    experts.text_config.norm_topk_prob = False
    del places.text_config.rope_parameters["mrope_interleaved"]
    for config, sentence in ((experts, "add norm_topk_prob = true"), (places, "add mrope_interleaved = true")):
        config.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=sentence):
            VllmEngine(spec_of(tmp_path))


def test_untransposed_experts_are_rejected(tmp_path: Path) -> None:
    write_model(tmp_path, sized("qwen3_vl_moe"), 0)
    publish_experts(tmp_path / "model.safetensors")  # a second transposition restores the file
    with pytest.raises(ConfigError, match=r"gate_up_proj in .* has transformers' shape \[4, 64, 128\]"):
        VllmEngine(spec_of(tmp_path, load_weights=True))
