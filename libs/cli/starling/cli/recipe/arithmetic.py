"""Sizes of a run in words, printed by `starling run --dry-run`: what a step consists of, and how it is computed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starling.algo.algorithm import compares_scores, defaults
from starling.algo.staleness import num_slots
from starling.cli.model.scratch import model_folder
from starling.cli.plan.sizes import size_text
from starling.cli.recipe.schema import Recipe
from starling.common.counts import counted
from starling.common.errors import ConfigError, WeightsError
from starling.common.ids import TrainerKind
from starling.common.secret_settings import without_passwords
from starling.common.wire.messages import ModelLimits
from starling.controller.core.groups.validation.recording import replay_problem
from starling.policy.settings.optimizer import OptimizerSettings

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def describe_arithmetic(recipe: Recipe) -> list[str]:
    """Return one line for each product that sets the size of a step, and for each choice of the algorithm.

    Raises:
        ConfigError: there is no such algorithm or option of it, or no such model.
    """
    if not recipe.kind.trains:
        size = _outlined(recipe).size
        return [*_answering(recipe), f"model: {size}, in {_each(recipe.num_rollouts, 'instance')}"]
    lines = []
    steps, what, kind = recipe.examples, "example", "supervised"
    if recipe.kind.learns_from_pairs:
        what, kind = "pair", recipe.kind.objective
    if steps.num_steps:
        lines.append(f"{kind}: {_product(what, step=steps.num_steps, **{what: steps.examples_per_step})}")
    if recipe.sft.num_steps and not recipe.kind.learns_from_pairs:
        lines.append(_optimizer_line(recipe.policy.sft.optimizer, " of the supervised steps"))
    if recipe.kind.reads_trajectories:
        rl = recipe.rl
        groups = _product("group", step=rl.num_steps, group=rl.prompts_per_step)
        lines.append(f"the run: {groups} of {recipe.data.source}")
        lines += [*_algorithm(recipe), _optimizer_line(recipe.policy.optimizer)]
    if recipe.kind.learns_from_rewards and recipe.rl.num_steps:
        lines += [*_reinforcement(recipe), *_algorithm(recipe), _optimizer_line(recipe.policy.optimizer)]
    if recipe.kind.objective == "dpo":
        dpo = recipe.policy.dpo
        anchor = "the initial model as its reference" if dpo.use_reference else "no reference"
        lines += [f"preferences: {dpo.loss}, beta = {dpo.beta:g}, {anchor}", _optimizer_line(dpo.optimizer)]
    if recipe.kind.objective == "reward_model":
        lines.append(_optimizer_line(recipe.policy.reward_model.optimizer))
    lines.append(_trained(recipe))
    outlined = _outlined(recipe)
    lines += outlined.precision + (_mesh(recipe, offloads=outlined.offloads) or outlined.memory)
    travels = recipe.generates
    if recipe.model.lora is not None or not travels:
        lines.append(f"model: {outlined.size}")
    if travels:
        what = outlined.published if recipe.model.lora is None else "the adapters alone"
        to = _each(recipe.num_rollouts, "rollout")
        lines.append(f"weight sync: {what} to {to}, {_when_published(recipe)}")
    if recipe.policy.weights_from:
        source = without_passwords(recipe.policy.weights_from)
        lines.append(f"initial weights: from {source}, which the policy reads when it starts")
    return lines


def _when_published(recipe: Recipe) -> str:
    """Return when the weights are published, in words."""
    every, least_s = recipe.rl.sync_every, recipe.rl.sync_every_s
    if every == 0:
        when = "when no group is left to start with the version before"
    else:
        when = "after every step" if every == 1 else f"after every {every} steps"
    return f"{when}, at least {least_s:g} s apart" if least_s else when


def _product(result: str, **factors: int) -> str:
    """Return a product in words: the number of each factor with its noun, and that of the `result`."""
    terms = (counted(num, noun) for noun, num in factors.items())
    return f"{' x '.join(terms)} = {counted(math.prod(factors.values()), result)}"


def _each(num: int, noun: str) -> str:
    return f"each of {counted(num, noun)}" if num > 1 else counted(num, noun)


def _answering(recipe: Recipe) -> list[str]:
    """Return the size of a run without a policy."""
    rl, kind = recipe.rl, recipe.kind
    if kind.serves_requests:
        return ["the run: requests, until it is stopped"]
    if kind.answers_each_prompt:
        return [f"the run: each prompt once, {counted(recipe.evaluation.num_completions, 'completion')} of each"]
    sequences = _product("sequence", file=rl.num_steps, prompt=rl.prompts_per_step, completion=rl.group_size)
    return [f"the run: {sequences}"]


def _reinforcement(recipe: Recipe) -> list[str]:
    rl, sampling = recipe.rl, recipe.sampling
    sequences = rl.prompts_per_step * rl.group_size
    slots = num_slots(rl.prompts_per_step, rl.max_staleness)
    tokens = sequences * sampling.max_tokens
    least = math.ceil(tokens / recipe.policy.tokens_per_microbatch)
    is_decoupled = compares_scores(recipe.policy.algorithm.name)
    equal = "equal scores of each scorer" if is_decoupled else "equal rewards"
    filtered = [
        f"dynamic sampling: groups with {equal} are replaced by further ones until each step is full; at most "
        f"{recipe.plan().max_filtered} in a row"
    ]
    weighted = ", ".join(f"{one.weight:g} x {one.label}" for one in recipe.scores_to_train)
    evaluation = [] if recipe.reward is None else [one.title for one in recipe.reward.evaluation_scorers()]
    evaluated = [
        f"evaluation scorers: {', '.join(evaluation)}, in no reward; of {recipe.evaluation.training_share:.0%} of the "
        "groups, and of all held-out prompts"
    ]
    decoupled = [f"advantages: each scorer normalised by itself, then {weighted}"] if is_decoupled else []
    teachers = []
    if recipe.teacher is not None:
        num, top_k = recipe.launch.num_teachers, recipe.teacher.top_k
        scores = (
            f"the {top_k} most likely tokens at each position" if top_k else "log-probabilities of the sampled tokens"
        )
        teachers = [f"teachers: {num}; each completion is scored by one: {scores}"]
    microbatches = (
        f"microbatches: at most about {least} of {recipe.policy.tokens_per_microbatch:,} tokens (prompts come on top)"
    )
    return [
        f"a step: {_product('sequence', prompt=rl.prompts_per_step, completion=rl.group_size)}, "
        f"at most {counted(tokens, 'sampled token', form=',')}",
        *([] if recipe.diffusion is not None else [microbatches]),
        f"staleness: at most {rl.max_staleness}, so ({rl.max_staleness} + 1) x {rl.prompts_per_step} = {slots} groups "
        f"exist at a time; {_product('group', rollout=recipe.num_rollouts, slot=recipe.rollout.num_slots)} can "
        "be generated at a time",
        f"the run: {_product('group', step=rl.num_steps, prompt=rl.prompts_per_step)}",
        *(filtered if rl.dynamic_sampling else []),
        *decoupled,
        *(evaluated if evaluation else []),
        *teachers,
    ]


def _algorithm(recipe: Recipe) -> list[str]:
    # Imported here, as torch takes seconds, and only --dry-run needs it.
    from starling.policy.train.loss.objective import SETTINGS, check_objective, objective_of

    settings = recipe.policy.algorithm
    check_objective(settings)
    objective = objective_of(settings)
    options = defaults(objective.loss) | defaults(objective.advantage)
    choices = [f"{SETTINGS.get(name, name)} = {value}" for name, value in options.items()]
    choices += [f"aggregate = {objective.aggregate}", f"old = {objective.old}"]
    if settings.kl_coefficient:
        choices.append(f"kl_coefficient = {settings.kl_coefficient:g} ({settings.kl_estimator})")
    corrections = [
        f"{one.kind} ({one.level}) "
        + (f"from {one.low:g} to {one.high:g}" if one.kind == "mask" else f"at {one.high:g}")
        for one in objective.corrections
    ]
    passes, minibatches = settings.num_passes, settings.num_minibatches
    return [
        f"algorithm: {settings.name}, {', '.join(choices)}",
        f"corrections: {', '.join(corrections) or 'none'}",
        f"updates: {counted(passes, 'pass', 'passes')} x {counted(minibatches, 'minibatch', 'minibatches')} = "
        f"{passes * minibatches} a step",
    ]


def _optimizer_line(optimizer: OptimizerSettings, whose: str = "") -> str:
    """Return kind, learning rate and schedule of an optimizer."""
    schedule: str = optimizer.schedule
    if schedule == "wsd":
        schedule += f" over the last {counted(optimizer.decay_steps, 'step')}"
    if schedule != "constant":
        schedule += f" to {optimizer.final_share * optimizer.learning_rate:g}"
    rise = f"{counted(optimizer.warmup_steps, 'step')} of warm-up, then " if optimizer.warmup_steps else ""
    return f"optimizer{whose}: {optimizer.kind}, learning rate {optimizer.learning_rate:g}, {rise}{schedule}"


def _trained(recipe: Recipe) -> str:
    lora, frozen = recipe.model.lora, recipe.policy.frozen
    if lora is not None:
        targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
        kind = "DoRA" if lora.dora else "LoRA"
        whole = f", and {', '.join(lora.modules_to_save)} whole" if lora.modules_to_save else ""
        return f"trained: {kind} adapters of rank {lora.rank} and alpha {lora.alpha:g}, targets {targets}{whole}"
    return f"trained: all parameters but {', '.join(frozen)}" if frozen else "trained: all parameters"


@dataclass(frozen=True, slots=True)
class _Outlined:
    """What is known of a recipe's model without its weights, in words."""

    size: str
    published: str
    """What a rollout pulls of a version without adapters."""
    precision: list[str] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)
    """Lines on the policy."""
    offloads: bool = False
    """The optimizer's moments lie in host memory."""


def _outlined(recipe: Recipe) -> _Outlined:
    """Return what is known of the recipe's model.

    Nothing is allocated. The policy's settings are checked against the model. Raises ConfigError, as the policy does.
    """
    if recipe.diffusion is not None:
        return _outlined_pipeline(recipe)
    # Imported here, as torch takes seconds, and only --dry-run needs it.
    from starling.policy.train.fit import check_fit
    from starling.policy.train.memory.compiled import check_compiler
    from starling.policy.train.memory.offload import DEVICE_TYPES
    from starling.policy.train.model.load import check_liger, find_device, freeze, outline
    from starling.policy.train.model.lora import load_adapters
    from starling.policy.train.model.routing import declared_experts
    from starling.weightsync.tensors.adapters import add_adapters

    trainer, lora = recipe.kind.trainer, recipe.model.lora
    scores = trainer == "reward_model"
    with model_folder(recipe.model.path, recipe.model.scratch) as folder:
        trust = recipe.model.trust_remote_code
        model = outline(folder, dtype=recipe.model.dtype, trust_remote_code=trust, scores=scores)
    parameters, item_bytes = model.num_parameters(), ITEM_BYTES[recipe.model.dtype]
    size = f"{parameters:,} parameters x {item_bytes} bytes = {parameters * item_bytes:,} bytes"
    if trainer is None:
        return _Outlined(size, size)
    if lora is not None:
        add_adapters(model, lora, seed=recipe.run.seed)
        if lora.adapter:
            load_adapters(model, Path(lora.adapter))
    freeze(model, recipe.policy.frozen)
    device = find_device(recipe.model.device)
    if recipe.policy.liger:
        check_liger(model.config.model_type, device)
    if recipe.policy.memory.compile:
        check_compiler(device)
    check_fit(model, recipe.policy, trainer)
    if recipe.kind.has_rl_steps and recipe.sampling.routing == "replayed":
        limits = ModelLimits(experts=declared_experts(model))
        if problem := replay_problem(recipe.sampling.to_wire(), recipe.rl.group_size, limits):
            raise ConfigError(problem)
    published = _codes(model, recipe.weights.quantise) if recipe.weights.quantise and recipe.generates else size
    precision, memory = _precision(recipe, model, device), _memory(recipe, model, trainer, device)
    offloads = recipe.policy.memory.offload_optimizer and device.type in DEVICE_TYPES
    return _Outlined(size, published, precision, memory, offloads)


def _outlined_pipeline(recipe: Recipe) -> _Outlined:
    """Return what is known of the transformer of a recipe's pipeline. Raises ConfigError, as the policy does."""
    from starling.algo.diffusion.folder import read_pipeline
    from starling.policy.train.diffusion.load import outline
    from starling.policy.train.memory.offload import DEVICE_TYPES
    from starling.policy.train.model.load import find_device, freeze
    from starling.policy.train.optim.optimizer import check_optimizers
    from starling.weightsync.tensors.adapters import add_adapters

    with model_folder(recipe.model.path, recipe.model.scratch) as folder:
        model = outline(read_pipeline(folder), recipe.model.dtype)
    num_parameters = sum(one.numel() for one in model.parameters())
    size_bytes = sum(one.nbytes for one in model.parameters())
    size = f"{num_parameters:,} parameters = {size_bytes:,} bytes"
    if recipe.model.lora is not None:
        add_adapters(model, recipe.model.lora, seed=recipe.run.seed)
    freeze(model, recipe.policy.frozen)
    check_optimizers(model, recipe.policy, "rl")
    offloads = recipe.policy.memory.offload_optimizer and find_device(recipe.model.device).type in DEVICE_TYPES
    return _Outlined(size, size, offloads=offloads)


def _codes(model: Any, form: str) -> str:
    """Return the size of a version with quantised linear layers, in words. Raises ConfigError if one cannot be."""
    from starling.policy.train.model.load import version_tensors
    from starling.weightsync.plan.layout import TensorSpec, item_bytes
    from starling.weightsync.quantise.layouts import quantisation_of
    from starling.weightsync.quantise.recipe import FUSED_BY_VLLM, linear_weights

    tensors = version_tensors(model).items()
    specs = [
        TensorSpec(name=name, shape=tuple(one.shape), dtype=str(one.dtype).removeprefix("torch."))
        for name, one in tensors
    ]
    try:
        made = quantisation_of(specs, linear_weights(form, FUSED_BY_VLLM)).tensors
    except WeightsError as error:
        raise ConfigError(f"weights.quantise = {form!r}: {error}") from error
    num_bytes = sum(item_bytes(one) * math.prod(one.shape) for one in made)
    return f"{model.num_parameters():,} parameters, as {form} in linear layers = {num_bytes:,} bytes"


def _precision(recipe: Recipe, model: Any, device: Any) -> list[str]:
    """Return which layers of `model`, an outline, multiply in low precision. Raises ConfigError, as the policy does."""
    from starling.policy.train.precision.layers import check_precision, emulates

    kind = recipe.policy.precision.kind
    if kind == "none":
        return []
    layers = check_precision(model, recipe.policy)
    how = f", emulated on {device.type}" if emulates(kind, device) else ""
    num = f"{len(layers.low)} of {counted(layers.num_linear, 'linear layer')}"
    return [f"precision: {kind} in {num}{how}; {recipe.model.dtype} elsewhere"]


def _mesh(recipe: Recipe, *, offloads: bool) -> list[str]:
    """Return the mesh of a policy, and what each of its ranks holds and sends; nothing if it has one rank.

    `offloads`: see `_Outlined`.
    """
    from starling.policy.plan.memory import memory_of
    from starling.policy.plan.proposals import written
    from starling.policy.plan.sizes import model_sizes
    from starling.policy.plan.stages import num_passes
    from starling.policy.plan.traffic import Update, traffic_of

    policy, parallel = recipe.policy, recipe.policy.parallel
    if parallel.num_ranks == 1:
        return []
    mesh = f"mesh: {written(parallel)} = {counted(parallel.num_ranks, 'rank')}"
    with model_folder(recipe.model.path, recipe.model.scratch) as folder:
        config = json.loads((folder / "config.json").read_bytes())
    try:
        sizes = model_sizes(config)
    except (ConfigError, WeightsError) as error:
        return [f"{mesh}; its memory and traffic are not known beforehand: {error}"]
    item = ITEM_BYTES[recipe.model.dtype]
    num_microbatches = num_passes(parallel, 1)
    update = Update(num_microbatches, policy.tokens_per_microbatch, item, policy.memory.checkpointing != "none")
    memory = memory_of(sizes, parallel, update, chunk_tokens=policy.memory.logprob_chunk_tokens, offloads=offloads)
    sent = traffic_of(sizes, parallel, update)
    return [
        f"{mesh}; each needs about {size_text(memory.total)}, {size_text(memory.states)} of them for its "
        + ("weights and gradients; its moments lie in host memory" if offloads else "weights, gradients and moments"),
        f"in {'a pass of a microbatch' if num_microbatches == 1 else f'the passes of {num_microbatches} microbatches'} "
        "and an update each sends "
        + ", ".join(f"{size_text(one.num_bytes)} along {axis}" for axis, one in sent.items()),
    ]


def _memory(recipe: Recipe, model: Any, trainer: TrainerKind, device: Any) -> list[str]:
    """Return lines on the peak memory of a policy with `model`, an outline."""
    from starling.policy.train.budget import describe_memory, estimate_memory

    # A sequence that is longer than a microbatch has one to itself.
    longest = recipe.sampling.max_tokens if recipe.generates else 0
    num_tokens = max(recipe.policy.tokens_per_microbatch, longest)
    try:
        memory = estimate_memory(model, recipe.policy, trainer, device, num_tokens)
    except ConfigError as error:
        return [f"memory of the policy: not known beforehand: {error}"]
    return describe_memory(memory, recipe.policy.memory, device)
