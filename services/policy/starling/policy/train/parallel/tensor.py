"""Tensor parallelism with sequence parallelism, by the plan of the matrices that transformers ships with a model.

    embedding          rows of the vocabulary on each rank; its output is a part of the row's tokens
    norms, routers     whole; they compute that part, as do whole experts
    attention, MLP     each is a region: its input is gathered, and its last matrix sums over the ranks, each of which
                       keeps its part of the tokens
    last norm          its output is gathered
    output layer       rows of the vocabulary on each rank; log-probabilities are normalised over all of them, see
                       `starling.policy.train.loss.logprobs`: logits are never gathered
    layer of scores    whole on each rank, which computes all scores

A matrix in a region is divided by one of these styles:

    columns    each rank has some columns of the output
    gathered   the same, and the output is gathered: something needs all of it, such as a norm over all heads
    rows       each rank has some rows of the input, which is its own already
    split      the same, of an input that each rank has whole
    packed     columns of two matrices in one, of which each rank goes on with its part of both
    kept       a norm over all heads, of which each rank goes on with its own

Where there are fewer key heads than ranks, projections of keys and values are whole on each rank, which keeps the head
of its query heads.

Whatever is whole has a part of its gradient on each rank: outside of regions that of the tokens of the rank, within
them that of its matrices. So all of them are summed over the ranks once per update, and nothing within a pass.

The plan is not trusted: the divided model computes a few tokens, forward and backward, as the whole one did before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.probe import PROBE, is_close, probe_tokens
from starling.common.errors import ConfigError
from starling.policy.train.memory.blocks import class_forward, find_blocks, last_norm, replace_forward
from starling.policy.train.model.attention import structured
from starling.policy.train.model.experts import find_experts
from starling.policy.train.model.layout import AttentionPlan, hidden_and_gradient
from starling.policy.train.model.lm_head import (
    VocabularyShard,
    final_layer,
    find_lm_head,
    has_final_layer,
    shard_vocabulary,
)
from starling.policy.train.parallel.collectives import gather, reduce_scatter
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.weights.adapters import base_layer, divided_factors
from starling.policy.train.parallel.weights.shards import local_parameters, seen_as

Style = Literal["columns", "gathered", "rows", "split", "packed", "kept", "whole"]

_STYLES: Final[dict[str, Style]] = {
    "colwise": "columns",
    "colwise_gather_output": "gathered",
    "rowwise": "rows",
    "rowwise_split_input": "split",
    "packed_colwise": "packed",
    "replicated_with_grad_allreduce": "whole",
    "mla_kv_a_proj": "whole",
}
"""By the names of transformers."""
_HEADS: Final = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_LATENT_HEADS: Final = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
_GATED: Final = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
_ADDED: Final[dict[str, dict[str, dict[str, str]]]] = {
    "deepseek_v3": {"self_attn": _LATENT_HEADS},
    "gpt_oss": {"self_attn": _HEADS | {"sinks": "colwise"}},
    "qwen3_vl_text": {"self_attn": _HEADS, "mlp": _GATED},
}
"""What the plans of some models lack, by type of the language model and module of a block."""
_ENDS: Final = ("embed_tokens", "norm", "lm_head")
"""Modules beside the blocks, which are divided in one way only, whatever a plan says."""
_ROUNDED: Final = 0.5
"""Largest difference in low precision, relative to the largest number: one of a wrong matrix is larger."""
_TOKENS: Final = -2
"""Dimension of the tokens of hidden states, [R, L, H] or [L, H]."""


def check_tensors(model: Any, size: int) -> None:
    """Check that `size` ranks can divide `model`.

    Raises:
        ConfigError: it has no plan, an entry of its plan has no counterpart here, or ranks cannot divide a matrix.
    """
    given = f"policy.parallel.tp = {size}"
    if not has_final_layer(model) or not _plan(model):
        raise ConfigError(
            f"{given} has no plan for {type(model).__name__}, only for language and reward models for which "
            "transformers has one: set it to 1, and use dp_shard"
        )
    last_norm(model)
    config = model.config.get_text_config()
    divided, heads = {"attention heads": int(config.num_attention_heads)}, set[int]()
    for block, styles in zip(find_blocks(model), block_styles(model), strict=True):
        for name, style in styles.items():
            is_module = name in dict(block.named_modules())
            found = base_layer(block.get_submodule(name)) if is_module else block.get_parameter(name)
            weight: Any = getattr(found, "weight", found)
            if name.endswith(("k_proj", "v_proj")) and (own := _key_heads(block, name)):
                heads.add(own)
            elif style in ("rows", "split"):
                divided.setdefault(f"inputs of {name}", weight.shape[1])
            elif style in ("columns", "gathered"):
                divided.setdefault(f"outputs of {name}", weight.shape[0])
            elif style == "packed":
                divided.setdefault(f"outputs of each half of {name}", weight.shape[0] // 2)
    fitting = [
        str(one)
        for one in range(1, divided["attention heads"] + 1)
        if not any(number % one for number in divided.values()) and not any(each % one and one % each for each in heads)
    ]
    remedy = f"set tp = {' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))}"
    for name, number in divided.items():
        if number % size:
            raise ConfigError(f"{given} does not divide the {number} {name}: {remedy}")
    for each in sorted(heads):
        if each % size and size % each:
            raise ConfigError(f"{given} neither divides the {each} key heads nor is a multiple of them: {remedy}")


def block_styles(model: Any) -> list[dict[str, Style]]:
    """Return how each block of `model` is divided: styles by name of a module or parameter.

    Raises:
        ConfigError: an entry of its plan has no counterpart here.
    """
    blocks = find_blocks(model)
    plan = [(_pattern(model, entry), entry, style) for entry, style in _plan(model).items()]
    return [_styles_of(type(model).__name__, block, plan) for block in blocks]


def _plan(model: Any) -> dict[str, str]:
    """Return styles of transformers by its patterns of names in the language model's body."""
    config = model.config.get_text_config()
    own = getattr(config, "base_model_tp_plan", None) or {}
    added = {
        f"layers.*.{module}.{name}": style
        for module, styles in _ADDED.get(config.model_type, {}).items()
        for name, style in styles.items()
    }
    return {entry: style for entry, style in (added | dict(own)).items() if entry not in _ENDS}


def _pattern(model: Any, entry: str) -> re.Pattern[str]:
    """Return the expression of names within a block that `entry` means."""
    blocks, wildcard, name = entry.partition(".*.")
    if not wildcard or "." in blocks:
        raise _no_counterpart(type(model).__name__, entry, "it is not part of a block")
    return re.compile(re.escape(name).replace(r"\*", r"[^.]+"))


def _styles_of(kind: str, block: torch.nn.Module, plan: list[tuple[re.Pattern[str], str, str]]) -> dict[str, Style]:
    modules, parameters = dict(block.named_modules()), dict(block.named_parameters())
    # Whole, or divided by expert parallelism.
    experts = tuple(name.partition(".base_layer")[0] for name in find_experts(block))
    found: dict[str, Style] = {}
    for pattern, entry, style in plan:
        for name in modules | parameters:
            if not pattern.fullmatch(name) or any(f"{name}.".startswith(f"{one}.") for one in experts):
                continue
            if style not in _STYLES:
                raise _no_counterpart(kind, entry, f'its style "{style}" is not known')
            is_matrix = name in modules and isinstance(base_layer(modules[name]), torch.nn.Linear)
            if _STYLES[style] != "whole" and not is_matrix and not (name in parameters and style == "colwise"):
                raise _no_counterpart(kind, entry, "it is no matrix")
            if not name.rpartition(".")[0]:
                raise _no_counterpart(kind, entry, "it is not in a module of its own within the block")
            found[name] = _STYLES[style]
    found = {name: style for name, style in found.items() if style != "whole"}
    for region in {name.rpartition(".")[0] for name in found}:
        found |= _own_heads(block.get_submodule(region), region, found)
    return found


def _no_counterpart(kind: str, entry: str, reason: str) -> ConfigError:
    return ConfigError(
        f"policy.parallel.tp above 1 is not available for {kind}: the entry {entry} of its plan cannot be mapped "
        f"exactly, because {reason}; set tp = 1, and use dp_shard"
    )


def _own_heads(attention: torch.nn.Module, region: str, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return styles with which a rank attends with its own heads only, where those of transformers compute all.

    They gather queries, keys and values, because there are norms over all heads (OLMo 2).
    """
    own = {name.removeprefix(f"{region}."): style for name, style in styles.items() if name.startswith(f"{region}.")}
    if own != {"q_proj": "gathered", "k_proj": "gathered", "v_proj": "gathered", "o_proj": "split"}:
        return {}
    found: dict[str, Style] = {f"{region}.v_proj": "columns", f"{region}.o_proj": "rows"}
    for name in ("q", "k"):
        norm: Any = getattr(attention, f"{name}_norm", None)
        matrix: Any = base_layer(attention.get_submodule(f"{name}_proj"))
        if norm is not None and norm.weight.numel() == matrix.out_features:
            found[f"{region}.{name}_norm"] = "kept"
        else:
            found[f"{region}.{name}_proj"] = "columns"
    return found


def _key_heads(block: torch.nn.Module, name: str) -> int | None:
    """Return the heads of a projection of keys or values; None where they are not known."""
    attention: Any = block.get_submodule(name.rpartition(".")[0])
    matrix: Any = base_layer(block.get_submodule(name))
    head_dim = getattr(attention, "head_dim", None)
    return int(matrix.out_features) // int(head_dim) if head_dim else None


def divide_tensors(model: Any, mesh: Mesh) -> list[str]:
    """Divide the matrices of `model` over the axis tp, in place; every rank has the same whole ones before.

    Returns:
        The names of whole parameters, of whose gradient each rank computes a part.
    """
    axis, group = mesh.devices["tp"], mesh.group("tp")
    styles = block_styles(model)
    embedding, head = model.get_input_embeddings(), final_layer(model)
    is_tied, scores = embedding.weight is head.weight, model.get_output_embeddings() is None
    _divide_embedding(embedding, axis, group)
    whole = set[torch.nn.Parameter]()
    if scores:
        whole.update(head.parameters())  # each rank computes all scores, and so all of their gradient
    else:
        _divide_output(head, axis, group, embedding.weight if is_tied else None)
    norm = model.get_decoder().get_submodule(last_norm(model))
    norm.register_forward_hook(lambda _, __, output: gather(output, _TOKENS, group, divides_next=not scores))
    for block, own in zip(find_blocks(model), styles, strict=True):
        _divide_block(block, own, axis, group)
    divided = {parameter for parameter in model.parameters() if hasattr(parameter, "placements")}
    return [name for name, parameter in model.named_parameters() if parameter not in divided | whole]


def _divide(module: torch.nn.Module, name: str, axis: DeviceMesh, dim: int) -> None:
    """Replace a whole parameter of `module` by this rank's part of it."""
    whole = module.get_parameter(name)
    part = distribute_tensor(whole.detach(), axis, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, torch.nn.Parameter(part, requires_grad=whole.requires_grad))


def _divide_embedding(embedding: Any, axis: DeviceMesh, group: dist.ProcessGroup) -> None:
    first = -(-len(embedding.weight) // group.size()) * group.rank()  # as `torch.chunk` divides them
    _divide(embedding, "weight", axis, 0)
    if embedding.padding_idx is not None:  # the row without a gradient
        own = embedding.padding_idx - first
        embedding.padding_idx = own if 0 <= own < len(embedding.weight.to_local()) else None
    replace_forward(embedding, partial(_embed, group, first))


def _embed(group: dist.ProcessGroup, first: int, embedding: Any, token_ids: Tensor) -> Tensor:
    """Return the embeddings of this rank's part of the tokens, [R, l, H], from the ids of all, [R, L]."""
    with local_parameters(embedding):
        own = token_ids - first
        missing = (own < 0) | (own >= len(embedding.weight))
        found = class_forward(embedding, own.masked_fill(missing, 0)).masked_fill(missing[..., None], 0.0)
    return reduce_scatter(found, _TOKENS, group)


def _divide_output(head: Any, axis: DeviceMesh, group: dist.ProcessGroup, tied: torch.nn.Parameter | None) -> None:
    rows = -(-len(head.weight) // group.size())
    shard_vocabulary(head, VocabularyShard(rows * group.rank(), group))
    if head.bias is not None:
        _divide(head, "bias", axis, 0)
    if tied is None:
        _divide(head, "weight", axis, 0)
    else:
        head.weight = tied
    replace_forward(head, _with_local)


def _divide_block(
    block: torch.nn.Module, styles: Mapping[str, Style], axis: DeviceMesh, group: dist.ProcessGroup
) -> None:
    modules = dict(block.named_modules())
    parents = {name.rpartition(".")[0] for name in styles}
    with_parameters = {name.rpartition(".")[0] for name in styles if name not in modules}
    for region in parents:
        if not any(region.startswith(f"{other}.") for other in parents):
            modules[region].register_forward_pre_hook(partial(_enter, group), with_kwargs=True)
    for region in with_parameters:
        replace_forward(modules[region], _with_local)
    for name, style in styles.items():
        parent, _, own = name.rpartition(".")
        module = modules.get(name)
        heads = _key_heads(block, name) if own in ("k_proj", "v_proj") else None
        if module is None:
            _divide(modules[parent], own, axis, 0)
        elif style == "kept":
            of_keys = _key_heads(block, f"{parent}.k_proj") if own == "k_norm" else None
            module.register_forward_hook(partial(_keep, *_columns(module, of_keys, group)))
        elif heads is not None and heads % group.size():
            # Whole; where a norm over all heads follows, that keeps them.
            if style == "columns":
                module.register_forward_hook(partial(_keep, *_columns(module, heads, group)))
        else:
            for matrix in divided_factors(module, by_rows=style in ("rows", "split")):
                _divide_matrix(matrix, style, axis)


def _columns(module: torch.nn.Module, heads: int | None, group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the columns of a whole output that a rank goes on with, [start, stop), in units of heads if known."""
    width, rank, size = len(base_layer(module).get_parameter("weight")), group.rank(), group.size()
    if heads is None or not heads % size:
        return rank * width // size, (rank + 1) * width // size
    own = rank * heads // size
    return own * width // heads, (own + 1) * width // heads


def _keep(start: int, stop: int, _: torch.nn.Module, __: Any, output: Tensor) -> Tensor:
    return output[..., start:stop]


def _divide_matrix(module: torch.nn.Module, style: Style, axis: DeviceMesh) -> None:
    by_rows = style in ("rows", "split")
    _divide(module, "weight", axis, 1 if by_rows else 0)
    if module.bias is not None and not by_rows:
        _divide(module, "bias", axis, 0)
    replace_forward(module, partial(_multiply_rows if by_rows else _multiply_columns, axis, style))


def _multiply_columns(axis: DeviceMesh, style: Style, matrix: torch.nn.Module, hidden: Tensor) -> Tensor:
    output = _product(matrix, hidden, axis, Replicate())
    if style == "columns":
        return output
    group = axis.get_group()
    output = gather(output, -1, group)
    if style == "gathered":
        return output
    return torch.cat([half.chunk(group.size(), dim=-1)[group.rank()] for half in output.chunk(2, dim=-1)], dim=-1)


def _multiply_rows(axis: DeviceMesh, style: Style, matrix: Any, hidden: Tensor) -> Tensor:
    group, bias = axis.get_group(), matrix.bias
    if style == "split":
        hidden = hidden.chunk(group.size(), dim=-1)[group.rank()]
    with seen_as(matrix, {"bias": None}):
        output = _product(matrix, hidden, axis, Shard(hidden.dim() - 1))
    output = reduce_scatter(output, _TOKENS, group)
    return output if bias is None else output + bias


def _product(matrix: torch.nn.Module, hidden: Tensor, axis: DeviceMesh, placement: Placement) -> Tensor:
    """Return this rank's columns of a product, or its summand, from inputs that are whole or this rank's columns."""
    if type(matrix) is torch.nn.Linear:
        return cast(Tensor, _with_local(matrix, hidden))
    # A layer that computes in low precision has one scale for what all ranks have.
    is_whole = placement.is_replicate()
    whole = DTensor.from_local(
        hidden, axis, [placement], run_check=False, grad_placements=[Partial() if is_whole else placement]
    )
    output: Any = class_forward(matrix, whole)
    return cast(Tensor, output.to_local(grad_placements=[output.placements[0] if is_whole else Replicate()]))


def _with_local(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute `module` with this rank's parts of its parameters."""
    with local_parameters(module):
        return class_forward(module, *args, **kwargs)


def _enter(group: dist.ProcessGroup, _: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Gather the tokens that a region computes."""
    if args:
        return (gather(args[0], _TOKENS, group), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": gather(kwargs["hidden_states"], _TOKENS, group)}


class TensorProbe:
    """Results of a whole model on a few tokens, with which those of the divided one are compared."""

    def __init__(self, model: Any, plan: AttentionPlan, mesh: Mesh, *, rounds: bool = False) -> None:
        """Compute them.

        Args:
            model: which is whole.
            plan: of its attention, by segments.
            mesh: of the ranks.
            rounds: whether it computes in low precision, where results depend on what a rank has.

        Raises:
            ConfigError: only the model's own code can compute its logits.
        """
        scores = model.get_output_embeddings() is None
        if not scores and find_lm_head(model) is None:
            raise ConfigError(
                f"policy.parallel.tp = {mesh.size('tp')} needs an output layer that is a plain matrix, and that of "
                f"{type(model).__name__} is none: set it to 1, and use dp_shard"
            )
        self._plan, self._mesh, self._tolerance = plan, mesh, _ROUNDED if rounds else None
        # Where each rank goes on with a part of the vocabulary, the gradients of all ranks are added.
        self._share = 1.0 if scores else 1.0 / mesh.size("tp")
        self._expected = list(self._results(model, share=1.0))

    def check(self, model: Any) -> None:
        """Compare the hidden states and a gradient of the divided `model`; all ranks call this.

        Raises:
            ConfigError: they differ.
        """
        size, rank = self._mesh.size("tp"), self._mesh.place("tp")
        try:
            differs = True
            for (hidden, gradient), expected in zip(
                self._results(model, share=self._share), self._expected, strict=True
            ):
                own = expected[1].chunk(size, dim=_TOKENS)[rank]
                pairs = ((hidden / self._share, expected[0]), (gradient, own))
                differs &= not all(is_close(*pair, model.dtype, self._tolerance) for pair in pairs)
            reason = "it computes other hidden states or gradients" if differs else None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the code of a model raises anything
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        wrong = torch.tensor([reason is not None], dtype=torch.uint8, device=model.device)
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=self._mesh.group("tp"))
        if wrong.item():
            raise ConfigError(
                f"policy.parallel.tp = {size} is not available for {type(model).__name__}: divided by the plan of "
                f"transformers {reason or 'another rank finds a difference'}; set it to 1, and use dp_shard"
            )

    def _results(self, model: Any, share: float) -> Iterator[tuple[Tensor, Tensor]]:
        missing = -PROBE.num_tokens % self._mesh.size("tp")
        forest = Forest((*PROBE.lengths, missing), (*PROBE.parents, -1)) if missing else PROBE
        positions = torch.from_numpy(forest.positions)[None].to(model.device)
        for tokens in probe_tokens(model):
            yield hidden_and_gradient(
                model,
                lambda found: found * share,
                input_ids=torch.nn.functional.pad(tokens, (0, missing))[None],
                position_ids=positions,
                **structured(model, forest, self._plan.backend),
            )
