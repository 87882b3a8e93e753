"""Check of what a run reads besides its recipe, by `starling run --dry-run`: data, tokenizer, the user's code, weights.

Everything happens in this process, without a sandbox: the modules of scorers, environments and loggers are imported,
and none of their functions is called but that of a dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from starling.algo.text import encode_prompt
from starling.algo.tokenizer import check_end_token, load_tokenizer
from starling.cli.model.scratch import model_folder
from starling.cli.recipe.schema import Recipe
from starling.common.counts import counted
from starling.common.errors import ConfigError, WeightsError
from starling.common.importing import import_object, is_import_path
from starling.common.wire.messages import Prompt
from starling.controller.data.load import check_examples
from starling.controller.data.prompts import Needs, load_prompts, make_prompt
from starling.controller.data.settings import DataSettings
from starling.controller.data.sources import load_rows
from starling.controller.data.trajectories import TRAJECTORIES, check_enough, num_usable
from starling.controller.shell.loggers.fanout import check_logger
from starling.reward.score.scorers.registry import check_scorer
from starling.rollout.env.registry import KINDS, make_environment
from starling.weightsync.transports.nixl.agent import load_nixl
from starling.weightsync.transports.registry import choose_for_host

FIRST_ROWS: Final = 64
"""Rows of a dataset that are read, besides as many as it holds out."""


def check_inputs(recipe: Recipe) -> list[str]:
    """Read the first rows of each dataset, load the tokenizer, and import what the recipe names.

    Returns one line for each. Raises ConfigError for the first that a run could not use.
    """
    tokenizer, lines = (_tokenizer(recipe), []) if recipe.diffusion is None else (None, [_pipeline(recipe)])
    for key, settings, needs in _datasets(recipe):
        if settings.source.startswith(TRAJECTORIES):
            folder = Path(settings.source.removeprefix(TRAJECTORIES))
            num = num_usable(folder)
            check_enough(folder, num, recipe.rl.prompts_per_step)
            lines.append(f"{key}: {counted(num, 'group')} in {folder}")
            continue
        num, first = _first_rows(settings, needs, recipe)
        rows = f"the first {counted(num, 'row')} of {settings.source!r} {'is' if num == 1 else 'are'} usable"
        lines.append(f"{key}: {rows}, {_length(first, tokenizer, recipe)}")
    return lines + _weights(recipe) + _imports(recipe)


def _weights(recipe: Recipe) -> list[str]:
    """Return where the policy finds its initial weights, if not in the model's folder. Raises ConfigError."""
    policy = recipe.policy
    if not policy.weights_from:
        return []
    from starling.policy.train.checkpoint.source import check_source

    found = check_source(Path(recipe.model.path), policy.weights_from, policy.saving.storage_options)
    return [f"policy.weights_from: {found}"]


def _datasets(recipe: Recipe) -> Iterator[tuple[str, DataSettings, Needs]]:
    """Yield the datasets that a run of this kind reads: their key, their settings, and what their rows need."""
    kind, examples = recipe.kind, recipe.examples
    if kind.serves_requests:
        return
    if kind.answers_each_prompt:
        tasks = recipe.evaluation.tasks if kind.only_scores else ()
        yield from ((f"evaluation.tasks {task.name}", task.data, "prompt") for task in tasks)
        if not tasks:
            yield "data", recipe.data, "prompt"
        return
    needs: Needs = "pair" if kind.learns_from_pairs else "response"
    own = examples.data is not None
    yield "data", recipe.data, needs if examples.num_steps and not own and not kind.reads_trajectories else "prompt"
    if examples.data is not None and examples.num_steps:
        yield f"{kind.examples_section or 'sft'}.data", examples.data, needs


def _first_rows(settings: DataSettings, needs: Needs, recipe: Recipe) -> tuple[int, Prompt]:
    """Return the number of rows that were read, and the prompt of the first one. Raises ConfigError."""
    limit = settings.held_out + FIRST_ROWS
    limit = min(limit, settings.limit) if settings.limit else limit
    rows = load_rows(settings.model_copy(update={"limit": limit})).rows
    prompts = [make_prompt(row, number, settings, needs) for number, row in enumerate(rows)]
    if len(rows) < limit or limit == settings.limit:  # these are all rows that the run would have
        source = load_prompts(settings.model_copy(update={"limit": limit}), needs)
        if needs != "prompt":
            check_examples(source, recipe.examples, recipe.kind)
    return len(rows), prompts[0]


def _tokenizer(recipe: Recipe) -> Any:
    """Return the tokenizer of the recipe's model, checked as by the processes that load it. Raises ConfigError."""
    # They import transformers.
    from starling.rollout.engine.model_config import end_token_ids, max_trainable_length, read_config

    trust = recipe.model.trust_remote_code
    with model_folder(recipe.model.path, recipe.model.scratch) as folder:
        config = read_config(folder, trust_remote_code=trust)
        tokenizer = load_tokenizer(folder, config, trust_remote_code=trust)
        if recipe.generates:
            max_trainable_length(config, recipe.rollout.max_model_len)
            end_token_ids(tokenizer, folder)
        if recipe.kind.learns_from_examples_only:
            check_end_token(tokenizer, folder)
        return tokenizer


def _pipeline(recipe: Recipe) -> str:
    """Return the trajectories of the recipe's diffusion model in words. Raises ConfigError if there are none."""
    from starling.algo.diffusion.folder import pipeline_sampler, read_pipeline
    from starling.policy.train.diffusion.learner import check_method

    diffusion = recipe.diffusion
    assert diffusion is not None
    check_method(recipe.policy, diffusion)
    with model_folder(recipe.model.path, recipe.model.scratch) as path:
        folder = read_pipeline(path)
        sampler = pipeline_sampler(folder, diffusion)
        shape = folder.latent_shape(diffusion.height, diffusion.width, diffusion.num_frames)
    steps = f"{counted(sampler.num_steps, 'step')}, {len(sampler.actions)} of them with noise"
    return f"diffusion: {folder.transformer_class}, latents {list(shape)}, {steps}"


def _length(prompt: Prompt, tokenizer: Any, recipe: Recipe) -> str:
    """Return the size of a prompt in words. Raises ConfigError when the tokenizer cannot encode it."""
    if tokenizer is None:
        return "embedded by the rollouts"
    if prompt.media:
        return "the first with images or videos"
    num = len(encode_prompt(tokenizer, prompt))
    if num == 0:
        where = recipe.model.path or "[model.scratch]"
        raise ConfigError(
            f"the tokenizer in {where} knows nothing of the first prompt; add its files, or give another model.path"
        )
    return f"the first of {counted(num, 'token')}"


def _imports(recipe: Recipe) -> list[str]:
    """Import scorers, environment, engine and loggers. Returns one line for each kind.

    Raises ConfigError when one cannot be imported, or is not installed.
    """
    lines = []
    if recipe.reward is not None and recipe.kind.is_scored:
        for scorer in recipe.reward.scorers:
            if scorer.python is None:  # else its service finds out, in the environment of the scorer
                check_scorer(scorer.name, scorer.options)
        lines.append(f"scorers: {', '.join(scorer.title for scorer in recipe.reward.scorers)}")
    environment = recipe.rollout.environment
    if environment.kind and recipe.generates:
        if environment.kind not in KINDS:  # the others start processes
            make_environment(environment)
        lines.append(f"environment: {environment.kind}")
    if recipe.generates:
        lines.append(f"engine: {_engine(recipe.rollout.engine)}")
    for name in recipe.logging.loggers:
        check_logger(name)
        lines.append(f"logger: {name}")
    return lines + _transports(recipe)


def _engine(name: str) -> str:
    """Return the engine in words. Raises ConfigError when it, or what it needs, is not installed."""
    if is_import_path(name):
        import_object(name, "Engine")
    elif name == "vllm":
        from starling.rollout.engine.vllm.launch import check_version

        return check_version()
    return name


def _transports(recipe: Recipe) -> list[str]:
    """Return a notice when weights leave this host over TCP beside an RDMA port.

    Raises ConfigError when a transport of the weights is not installed; plain sockets replace UCX where it is not.
    """
    if not recipe.generates or not recipe.kind.trains:
        return []
    for key, transport in (("policy", recipe.policy.transport), ("rollout", recipe.rollout.transport)):
        if transport == "nixl":
            try:
                load_nixl()
            except WeightsError as error:
                raise ConfigError(f"{key}.transport = 'nixl': {error}") from error
    network = recipe.network
    chosen = choose_for_host(recipe.policy.transport, network.host, encrypt=network.encrypt_weights)
    return [f"notice: {chosen.unused_rdma}"] if chosen.unused_rdma else []
