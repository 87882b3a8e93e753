"""Load-balancing loss of the routers of a mixture of experts, defined for each sequence.

For a sequence of T input tokens and a router that sends each token to K of E experts,

    loss = E * sum over experts of f P,   f = (tokens sent to the expert) / T,   P = mean probability of the expert

(Switch Transformers, arXiv:2101.03961, equations 4 to 6; by sequence as in DeepSeek-V3, arXiv:2412.19437, equations 17
to 20). It is at least about K, where all experts are used alike; f has no gradient. The loss of an update is the mean
over its sequences and routers: it depends neither on the microbatch of a sequence nor on the sequences beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from starling.algo.experts import find_experts
from starling.common.errors import ConfigError
from starling.policy.train.data.packing import Index, MicrobatchInputs
from starling.policy.train.loss.balance import ExpertBias
from starling.policy.train.loss.experts import ExpertLoad, ReplayShare, TokenRanks, load_metrics
from starling.policy.train.metrics.tokens import TokenMetrics

METRIC: Final = "router_aux_loss"


class RouterLoss:
    """The load-balancing loss of a model's routers, times a coefficient; nothing where the coefficient is 0.

    The load of the experts is counted in the same forward passes, whatever the coefficient.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        coefficient: float,
        ranks: TokenRanks | None = None,
        *,
        counts: bool = True,
        bias_rate: float = 0.0,
    ) -> None:
        """Find the routers.

        Args:
            model: to be trained.
            coefficient: of the loss.
            ranks: where `model` is on a mesh.
            counts: whether to count the load, for which hooks run inside the blocks.
            bias_rate: change of an expert's bias in each step, see `ExpertBias`; 0 for none.

        Raises:
            ConfigError: there is a coefficient, and transformers defines no such loss for `model`.
        """
        self._coefficient = coefficient
        self._routers: list[tuple[torch.nn.Module, int]] = []
        if coefficient:
            self._routers = find_routers(model) if ranks is None or not ranks.num_routers else declared_routers(model)
        self._num_routers = len(self._routers) if ranks is None else ranks.num_routers
        self._num_chosen = _num_chosen(model) if coefficient else 0
        self._logits: list[Tensor] = []
        self._ranks, self._load = ranks, ExpertLoad(model, ranks) if counts else None
        self._bias = ExpertBias(model, bias_rate) if bias_rate else None
        # A rollout may send false experts of its tokens, and would move the bias of an expert without end.
        self._own_load = ExpertLoad(model, ranks, of_own_choice=True) if bias_rate else None
        self._counts: dict[str, Tensor] = {}
        """Load of a step that is complete, by name of the experts."""
        self._own_counts: dict[str, Tensor] = {}
        """The same, of the routers' own choice."""
        self._replayed, self._share = ReplayShare(ranks), dict[str, float]()
        self._has_experts = bool(find_experts(model) if ranks is None else ranks.expert_layers)
        self._device = next(model.parameters()).device

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the routers' logits of the forward pass that computes gradients.

        The hooks do not compute and are gone before the backward pass: a recomputed block is the same without them.
        """
        self._logits = []
        handles = [router.register_forward_hook(self._recorder(index)) for router, index in self._routers]
        try:
            with ExitStack() as loads:
                for load in self._loads:
                    loads.enter_context(load.recording())
                yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_step(self) -> None:
        """Forget the load of a step that was not completed."""
        self._replayed.clear()
        for load in self._loads:
            load.clear()

    @property
    def _loads(self) -> list[ExpertLoad]:
        return [load for load in (self._load, self._own_load) if load is not None]

    def complete_load(self) -> None:
        """Sum the load of a step over all ranks, before its last update: other replicas may be lost after that."""
        self._counts = {} if self._load is None else self._load.read()
        self._own_counts = {} if self._own_load is None else self._own_load.read()
        self._share = self._replayed.read(self._device) if self._has_experts else {}

    def end_step(self, *, skipped: bool) -> dict[str, float]:
        """Balance the experts by their load in the step, unless it was `skipped`. Returns the metrics of both classes
        that count."""
        counts, self._counts = self._counts, {}
        own_counts, self._own_counts = self._own_counts, {}
        if not counts:
            return self._share
        if self._bias is not None and not skipped:
            self._bias.update(own_counts)
        return load_metrics(torch.stack(list(counts.values()))) | self._share

    def add_to(self, loss: Tensor, inputs: MicrobatchInputs, num_sequences: int, metrics: TokenMetrics) -> Tensor:
        """Return `loss` plus the routers' part of it, from the forward pass that was recorded last.

        The forward pass of a stage has the part of the stage's routers.

        Args:
            loss: of the microbatch, a scalar.
            inputs: the microbatch.
            num_sequences: those of the whole update, over which the mean is taken.
            metrics: receives the routers' loss without its coefficient, as a part of a sum.
        """
        self._replayed.count(inputs)
        for load in self._loads:
            load.count(inputs)
        if not self._coefficient:
            return loss
        logits, self._logits = self._logits, []
        if not logits:
            return loss
        assert len(logits) <= len(self._routers), "each router runs at most once in a forward pass"
        losses = torch.stack([balance_losses(one, self._num_chosen, inputs, self._ranks).sum() for one in logits])
        own = losses.sum() / (num_sequences * self._num_routers)
        metrics.add_sum(METRIC, own)
        return loss + self._coefficient * own.to(loss.device)

    def attach_to(
        self, hidden: Tensor, inputs: MicrobatchInputs, num_sequences: int, metrics: TokenMetrics
    ) -> tuple[Tensor, Tensor]:
        """Return `hidden`, the output of a stage before the last, such that its gradient brings the routers' with it.

        For the other arguments see `add_to`. Returns the routers' part of the loss too, a scalar, detached.
        """
        loss = self.add_to(hidden.new_zeros((), dtype=torch.float32), inputs, num_sequences, metrics)
        if not loss.requires_grad:
            return hidden, loss
        attached: Tensor = _WithLoss.apply(hidden, loss)  # type: ignore[no-untyped-call]
        return attached, loss.detach()

    def _recorder(self, index: int) -> Callable[[torch.nn.Module, Any, Any], None]:
        def record(_: torch.nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():  # A reference model computes without.
                self._logits.append(output[index] if isinstance(output, tuple) else output)

        return record


class _WithLoss(torch.autograd.Function):
    """A tensor whose backward pass is also that of a loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


def balance_losses(
    logits: Tensor, num_chosen: int, inputs: MicrobatchInputs, ranks: TokenRanks | None = None
) -> Tensor:
    """Return one router's loss of each sequence of a microbatch, [S]; differentiable.

    A segment that several sequences share counts in each. Empty slots count in none.

    Args:
        logits: of the router for each slot, [R * L, E] in any shape that has so many elements.
        num_chosen: experts of each token, K.
        inputs: the microbatch.
        ranks: where each of several ranks has the logits of its slots only; the result is then the same on all of them,
            and its gradient with respect to these logits is whole.
    """
    num_experts, num_segments = logits.shape[-1], int(inputs.segments.max()) + 1
    flat = logits.reshape(-1, num_experts)
    probabilities = flat.softmax(-1, dtype=torch.promote_types(flat.dtype, torch.float32))
    own: Index = inputs.segments if ranks is None else ranks.own_segments(inputs)
    segments = torch.from_numpy(own).to(flat.device)
    segments = torch.where(segments < 0, num_segments, segments)  # one more, for empty slots
    chosen = probabilities.detach().topk(num_chosen, dim=-1).indices
    places = (segments[:, None] * num_experts + chosen).flatten()
    counts = torch.bincount(places, minlength=(num_segments + 1) * num_experts).view(-1, num_experts)
    sums = probabilities.new_zeros(num_segments + 1, num_experts).index_add(0, segments, probabilities)
    if ranks is not None:
        counts, sums = ranks.sum_slots(torch.stack([counts.to(sums.dtype), sums]))
    sequences, parts = torch.from_numpy(inputs.sequences).to(flat.device).unbind(1)
    num_sequences = int(inputs.sequences[-1, 0]) + 1

    def of_sequences(values: Tensor) -> Tensor:
        """Return the sums of `values` over each sequence, [S, E], from those over each segment."""
        zeros = values.new_zeros(num_sequences, num_experts)
        return zeros.index_add(0, sequences, values.index_select(0, parts))

    chosen_of_sequences = of_sequences(counts)
    num_tokens = chosen_of_sequences.sum(dim=-1, keepdim=True) / num_chosen
    shares = chosen_of_sequences / num_tokens
    means = of_sequences(sums) / num_tokens
    return num_experts * (shares * means).sum(dim=-1)


def find_routers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """Return the routers of `model` and the place of the logits in their results, as transformers declares them.

    Raises:
        ConfigError: transformers declares no router or no auxiliary loss for such a model.
    """
    found = declared_routers(model)
    if not found:
        raise ConfigError(
            f"policy.router_aux_coefficient needs a mixture of experts for which transformers has an auxiliary loss, "
            f"and {type(model).__name__} is not one: remove the setting"
        )
    return found


def declared_routers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """Return the same as `find_routers`, and nothing for other models."""
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    declared = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits", ())
    return [
        (module, recorder.index)
        for recorder in (declared if isinstance(declared, list | tuple) else [declared])
        for name, module in decoder.named_modules()
        if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name and _num_chosen(model)
    ]


def _num_chosen(model: torch.nn.Module) -> int:
    """Return the number of experts of each token; 0 where the configuration has no auxiliary loss."""
    config: Any = model.config
    text = config.get_text_config()
    has_loss = hasattr(text, "router_aux_loss_coef") or hasattr(config, "router_aux_loss_coef")
    return int(getattr(text, "num_experts_per_tok", 0)) if has_loss else 0
