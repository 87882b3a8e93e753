"""Steps of small models, with every gradient, on one rank or on a mesh."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.tensor import DTensor

from starling.algo.routing import Routing
from starling.common.settings import LoraSettings
from starling.common.wire.messages import ModelExperts
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.examples import PreferencePair, SftExample
from starling.policy.train.data.groups import ScoredGroup, TeacherLogprobs
from starling.policy.train.learner import Learner
from starling.policy.train.memory.setup import apply_memory_settings
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.precision.layers import use_precision
from starling.weightsync.tensors.adapters import add_adapters

VOCABULARY = 61
"""Divisible by no number of ranks."""
IMAGE, VIDEO = 59, 60
"""Placeholders."""
TOLERANCE = 2e-6
"""Of the Frobenius norm of a gradient's difference, relative to the gradient's."""
MODELS = {
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "qwen3-tied": ("qwen3", True),
    "llama": ("llama", False),
    "qwen3_moe": ("qwen3_moe", False),
    "gemma2": ("gemma2", True),
    "gemma3": ("gemma3_text", True),
    "gpt_oss": ("gpt_oss", False),
    "mistral": ("mistral", False),
    "phi3": ("phi3", False),
    "olmo2": ("olmo2", False),
    "granite": ("granite", True),
    "cohere": ("cohere", True),
    "glm4": ("glm4", False),
    "starcoder2": ("starcoder2", True),
    "deepseek_v3": ("deepseek_v3", False),
    "qwen2_5_vl": ("qwen2_5_vl", False),
    "qwen3_vl": ("qwen3_vl", True),
    "qwen3_vl_moe": ("qwen3_vl_moe", False),
}
"""Kind, and whether the output layer is the embedding."""
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5, "pad_token_id": 0},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 8, "pad_token_id": 0},
    "gpt_oss": {
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
        "pad_token_id": 0,
    },
    "mistral": {"sliding_window": 5},
    "phi3": {"pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.3,
    },
    "cohere": {"logit_scale": 0.5, "pad_token_id": 0},
    "glm4": {"pad_token_id": 0, "attention_bias": True},
    "starcoder2": {"sliding_window": None},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "pad_token_id": 0,
    },
}
"""What the configurations of some kinds have besides, or instead."""
TOWER: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "initializer_range": 0.1,
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
"""Vision towers by kind."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Variant:
    """A model and how it is trained, by a name such as ``adapted deep qwen3 by muon``."""

    kind: str
    tied: bool
    is_deep: bool
    """Four blocks instead of two."""
    adapters: LoraSettings | None
    """Those that are trained."""
    is_wide: bool
    """Matrices of more than 4096 elements."""
    optimizer: str

    @classmethod
    def of(cls, name: str) -> Variant:
        """Return the variant of that name."""
        model, _, optimizer = name.partition(" by ")
        *words, base = model.split()
        adapters = (ADAPTERS[word] for word in words if word in ADAPTERS)
        return cls(*MODELS[base], "deep" in words, next(adapters, None), "wide" in words, optimizer or "adamw")

    def load(self, **changes: Any) -> Any:
        """Return the model, the same each time; for `changes` see `make_model`."""
        sizes: dict[str, Any] = {"num_hidden_layers": 4 if self.is_deep else 2}
        if self.is_wide:
            sizes |= {"hidden_size": 64, "intermediate_size": 128}
        model = make_model(self.kind, self.tied, **(sizes | changes))
        if self.adapters is not None:
            add_adapters(model, self.adapters, seed=0)
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return model


ADAPTERS = {
    "adapted": LoraSettings(rank=4, alpha=8.0),
    "attention-adapted": LoraSettings(rank=4, targets=r".*self_attn\..*_proj"),
}
"""Of all layers, experts and routers included, and of those of the attention."""


@dataclass
class Outcome:
    """Results of some steps."""

    gradients: dict[str, Array] = field(default_factory=dict)
    """Of the first step, whole, by parameter, as its optimizer used them."""
    weights: dict[str, Array] = field(default_factory=dict)
    """After the last step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step."""


def make_model(
    kind: str, tied: bool, *, scores: bool = False, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Return a small model, the same each time, with norms and biases that matter."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
    } | changes
    if kind not in ("qwen2", "deepseek_v3"):
        sizes |= {"head_dim": 8}
    sizes |= SIZES.get(kind, {})
    if kind in TOWERS:
        sizes = _with_tower(kind, sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kinds: Any = AutoModelForImageTextToText if kind in TOWERS else AutoModelForCausalLM
        kinds = AutoModelForSequenceClassification if scores else kinds
        model = kinds.from_config(AutoConfig.for_model(kind, **sizes, **({"num_labels": 1} if scores else {}))).eval()
        with torch.no_grad():
            biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
            for tensor in (*model.parameters(), *biases):
                if tensor.dim() == 1:
                    tensor.add_(0.3 * torch.randn_like(tensor))
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # There is no grouped product of this type.
    return model.to(dtype)


def _with_tower(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a vision-language model."""
    tied = text.pop("tie_word_embeddings")
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {
        "text_config": text,
        "vision_config": TOWERS[kind],
        "tie_word_embeddings": tied,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
    }


def make_groups(
    num_groups: int = 3, seed: int = 0, *, longer_prompts: int = 0, images: bool = False, scored: bool = False
) -> list[ScoredGroup]:
    """Return groups of prompts and completions of different lengths.

    Prompts that are `longer_prompts` = 16 tokens longer are computed once for several completions. With `images` all
    but the first prompt have some. With `scored` they have log-probabilities of a teacher.
    """
    generator = np.random.default_rng(seed)
    found = []
    for index in range(num_groups):
        lengths = tuple(int(one) for one in generator.integers(3, 14, size=3))
        prompt_tokens = longer_prompts + int(generator.integers(2, 9))
        teacher = None
        if scored:
            top = np.stack([generator.permutation(VOCABULARY)[:4] for _ in range(sum(lengths))]).astype(np.int32)
            logprobs = np.log(generator.dirichlet(np.ones(5), size=sum(lengths))).astype(np.float32)
            teacher = TeacherLogprobs(logprobs[:, 0].copy(), top, logprobs[:, :4].copy())
        num_words = IMAGE if images else VOCABULARY
        prompt_ids = generator.integers(num_words, size=prompt_tokens).astype(np.int32)
        extra: dict[str, Array] = {}
        if images and index:
            prompt_ids, extra = _with_images(generator, prompt_ids, index)
        found.append(
            ScoredGroup(
                prompt_ids=prompt_ids,
                completion_ids=generator.integers(num_words, size=sum(lengths)).astype(np.int32),
                extra=extra,
                logprobs=(-3.4 + 0.4 * generator.standard_normal(sum(lengths))).astype(np.float32),
                versions=np.zeros(sum(lengths), dtype=np.int32),
                lengths=lengths,
                rewards=tuple(generator.standard_normal(3).tolist()),
                prompt_id=f"train/0/{index}",
                teacher=teacher,
            )
        )
    return found


def replayed(groups: list[ScoredGroup], sizes: ModelExperts | None) -> list[ScoredGroup]:
    """Return `groups` with random experts of all tokens but the last of each completion; the first prompt has none."""
    assert sizes is not None, "the model can replay routing"
    generator, found = np.random.default_rng(7), []
    for group in groups:
        shape = sizes.num_layers, sizes.num_experts
        prompt, completions = (
            generator.permuted(np.broadcast_to(np.arange(sizes.num_experts, dtype=np.uint8), (num, *shape)), axis=2)
            for num in (len(group.prompt_ids), len(group.completion_ids))
        )
        completions[np.cumsum(group.lengths) - 1] = 255
        if not found:
            prompt[:] = 255
        routing = Routing(prompt[..., : sizes.num_chosen].copy(), completions[..., : sizes.num_chosen].copy())
        found.append(replace(group, routing=routing))
    return found


def _with_images(generator: np.random.Generator, prompt_ids: Array, num_images: int) -> tuple[Array, dict[str, Array]]:
    """Return a prompt with images of different sizes after its first token, and a video at its end."""
    grids = [(1, 4, 2 * (2 + number)) for number in range(num_images)]
    video = (2, 4, 4)
    tokens, places = list[int](), list[Array]()

    def add(ids: list[int], positions: Array) -> None:
        start = max((int(one.max()) + 1 for one in places), default=0)
        tokens.extend(ids)
        places.append(positions + start)

    def add_media(token: int, grid: tuple[int, int, int]) -> None:
        shape = grid[0], grid[1] // 2, grid[2] // 2
        add([token] * int(np.prod(shape)), np.stack([one.ravel() for one in np.indices(shape)]))

    add([int(prompt_ids[0])], np.zeros((3, 1), np.int64))
    for grid in grids:
        add_media(IMAGE, grid)
    add(prompt_ids[1:].tolist(), np.tile(np.arange(len(prompt_ids) - 1), (3, 1)))
    add_media(VIDEO, video)
    add([1], np.zeros((3, 1), np.int64))

    def pixels(grid: tuple[int, int, int]) -> Array:
        return generator.standard_normal((int(np.prod(grid)), 3 * 2 * 4 * 4)).astype(np.float32)

    extra = {
        "pixel_values": np.concatenate([pixels(grid) for grid in grids]),
        "image_grid_thw": np.array(grids, np.int64),
        "pixel_values_videos": pixels(video),
        "video_grid_thw": np.array([video], np.int64),
        "position_ids": np.concatenate(places, axis=1).astype(np.int32),
    }
    return np.array(tokens, np.int32), extra


def make_examples(num_examples: int = 7, seed: int = 1) -> list[SftExample]:
    """Return examples of different lengths."""
    generator = np.random.default_rng(seed)
    return [SftExample(*_pieces(generator, 2)) for _ in range(num_examples)]


def make_pairs(num_pairs: int = 3, seed: int = 2) -> list[PreferencePair]:
    """Return pairs of different lengths."""
    generator = np.random.default_rng(seed)
    return [PreferencePair(*_pieces(generator, 3)) for _ in range(num_pairs)]


def _pieces(generator: np.random.Generator, number: int) -> list[Any]:
    return [generator.integers(VOCABULARY, size=int(generator.integers(2, 12))).astype(np.int32) for _ in range(number)]


def make_settings(
    *,
    router_aux_coefficient: float = 0.0,
    reference_reset_every: int = 0,
    precision: dict[str, Any] | None = None,
    kind: str = "adamw",
    algorithm: str = "grpo",
    **parallel: Any,
) -> PolicySettings:
    """Return settings in which an update is smooth in its gradient, which is not clipped.

    With an epsilon of 1 AdamW changes a weight by about its gradient: otherwise rounding of a gradient of almost 0
    decides about the sign of a whole step.
    """
    optimizer = {"kind": kind, "learning_rate": 0.01, "eps": 1.0, "max_grad_norm": 0.0, "ema_decay": 0.5}
    return PolicySettings.model_validate(
        {
            "tokens_per_microbatch": 32,
            "router_aux_coefficient": router_aux_coefficient,
            "optimizer": optimizer,
            "algorithm": {
                "name": algorithm,
                "kl_coefficient": 0.1,
                "reference_reset_every": reference_reset_every,
            },
            "distill": {"loss": "jsd"},
            "sft": {"optimizer": optimizer},
            "dpo": {"optimizer": optimizer},
            "reward_model": {"optimizer": optimizer},
            "precision": precision or {},
            "parallel": parallel,
        }
    )


def make_steps(
    name: str,
    step: str,
    parallel: dict[str, Any] | None = None,
    *,
    checkpointing: bool = False,
    reference_reset_every: int = 0,
    precision: dict[str, Any] | None = None,
    **changes: Any,
) -> Outcome:
    """Return the outcome of two steps of one kind, such as ``rl:dapo``; on a mesh, every rank calls this."""
    mesh = None if parallel is None else Mesh(ParallelSettings(**parallel))
    variant = Variant.of(name)
    step, _, algorithm = step.partition(":")

    def load() -> Any:
        model = variant.load(scores=step == "reward_model", **changes)
        if step != "reward_model":
            prepare(model, settings, MemorySettings(checkpointing="full" if checkpointing else "none"))
        return model

    settings = make_settings(
        router_aux_coefficient=0.3 if variant.kind == "qwen3_moe" else 0.0,
        reference_reset_every=reference_reset_every,
        precision=precision,
        kind=variant.optimizer,
        algorithm=algorithm or "grpo",
        **(parallel or {}),
    )
    learner = Learner(load, settings, mesh=mesh)
    for number in (1, 2):
        if step in ("rl", "distill"):
            groups = make_groups(seed=number, scored=step == "distill")
            metrics = learner.reinforce(groups, step=number, num_steps=4)
        elif step == "trees":
            metrics = learner.reinforce(make_groups(seed=number, longer_prompts=16), step=number, num_steps=4)
        elif step == "replay":
            groups = replayed(make_groups(seed=number, longer_prompts=16), learner.limits.experts)
            metrics = learner.reinforce(groups, step=number, num_steps=4)
        elif step == "images":
            metrics = learner.reinforce(make_groups(seed=number, images=True), step=number, num_steps=4)
        elif step == "sft":
            metrics = learner.supervise(make_examples(seed=number), num_steps=4)
        else:
            objective: Any = step
            metrics = learner.prefer(make_pairs(seed=number), objective=objective, step=number, num_steps=4)
        if number == 1:
            gradients = _gradients(learner)
    return Outcome(
        gradients=gradients,
        weights={name: whole(parameter) for name, parameter in learner.model.named_parameters()},
        metrics=metrics,
    )


def prepare(model: Any, settings: PolicySettings, memory: MemorySettings | None = None) -> None:
    """Do to a model, in place, what a policy does before it is on a mesh."""
    apply_memory_settings(model, memory or settings.memory)
    use_precision(model, settings)


def _gradients(learner: Learner) -> dict[str, Array]:
    assert learner.trainer is not None
    found = {}
    for name, trained in learner.trainer.optimizer._trained.items():
        gradient: Any = trained.grad
        parameter = learner.model.get_parameter(name)
        if isinstance(parameter, DTensor):
            gradient = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        found[name] = whole(gradient)
    return found


def whole(tensor: Any) -> Array:
    """Return all of a tensor, whatever its placement."""
    full = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    found: Array = (full if full.dtype == torch.float64 else full.float()).numpy().copy()
    return found


def assert_close(found: dict[str, Array], expected: dict[str, Array], tolerance: float = TOLERANCE) -> None:
    """Compare all tensors."""
    assert found.keys() == expected.keys()
    errors = {
        name: float(np.linalg.norm(found[name] - tensor) / np.linalg.norm(tensor))
        for name, tensor in expected.items()
        if np.linalg.norm(tensor) > 0.0 or found[name].any()
    }
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, wrong


@cache
def alone(name: str, step: str, dtype: torch.dtype = torch.float32) -> Outcome:
    """Return the outcome of a single process."""
    return make_steps(name, step, dtype=dtype)


def steps_of_rank(
    _: int, steps: list[tuple[str, str]], parallel: dict[str, Any], dtype: torch.dtype
) -> dict[tuple[str, str], Outcome]:
    """Make steps, each named by model and kind, on one rank of a mesh."""
    return {(name, step): make_steps(name, step, parallel, dtype=dtype) for name, step in steps}


def check_mesh(
    parallel: dict[str, Any],
    steps: list[tuple[str, str]],
    tolerance: float = TOLERANCE,
    dtype: torch.dtype = torch.float32,
    *,
    weights: float = TOLERANCE,
) -> None:
    """Compare gradients, weights and metrics of steps on every rank of a mesh with those of a single process."""
    for name, step in steps:
        alone(name, step, dtype)  # imports what the forked ranks then have
    outcomes = run_ranks(ParallelSettings(**parallel).num_ranks, steps_of_rank, steps, parallel, dtype)
    for name, step in steps:
        expected = alone(name, step, dtype)
        missing = set(expected.gradients)
        assert expected.metrics["num_microbatches"] >= 2
        for outcome in outcomes:
            found = outcome[name, step]
            for values, correct, most in (
                (found.gradients, expected.gradients, tolerance),
                (found.weights, expected.weights, weights),
            ):
                # A rank with the last stage has its own copy of an embedding that is the output layer too.
                embedding = next((one for one in correct if one.endswith("embed_tokens.weight")), None)
                if embedding is not None:
                    correct = {"lm_head.weight": correct[embedding], **correct}
                assert_close(values, {one: correct[one] for one in values}, most)
            missing -= set(found.gradients)
            assert step != "trees" or found.metrics["shared_token_fraction"] > 0.0
            assert Variant.of(name).kind != "qwen3_moe" or found.metrics["router_aux_loss"] > 0.0
            assert found.metrics.keys() == expected.metrics.keys()
            assert found.metrics == pytest.approx(expected.metrics, rel=2e-5, abs=1e-6)
            assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-6)
            if parallel.get("pp", 1) == 1:
                assert found.gradients.keys() == expected.gradients.keys()
                assert found.weights.keys() == expected.weights.keys()
        assert not missing, "stages have all parameters together"
