"""Optimizer of a model: master weights, gradient clipping, learning-rate schedule, and the EMA of the weights.

gradients -> norm -> skip if anything is not finite -> clip -> learning rates -> optimizer
          -> round the masters into parameters of fewer bits -> EMA of the weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.optim.adamw import adamw, adamw_8bit, import_adamw_8bit, plain_tensors
from starling.policy.train.optim.masters import Masters
from starling.policy.train.optim.muon import Matrices, Muon, hidden_matrices
from starling.policy.train.optim.norm import total_norm
from starling.policy.train.optim.rates import learning_rate, rate_factors, weight_decays

_MOST_UNCLIPPED: Final = 1e18
"""Norm of a gradient, from which on an average of its squares could be infinite, and would stay so."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Outcome of one optimizer update."""

    grad_norm: float
    """Euclidean norm of the whole gradient before clipping."""
    learning_rate: float
    """Of parameters without a factor on it."""
    skipped: bool
    """The gradient or the loss was not finite: weights, moments and EMA stayed as they were."""


class Shards(Protocol):
    """This rank's parts of tensors that are sharded over ranks, each of which updates its own."""

    tensors: dict[str, Tensor]
    """By name, in the memory of the sharded ones."""

    @property
    def copies(self) -> Mapping[str, str]:
        """Names of `tensors` that have to stay equal to another one, and those of the others."""

    def gather(self) -> None:
        """Complete the gradients of `tensors`. Raises PeersLostError if other replicas are lost."""

    def clear(self) -> None:
        """Free the gradients."""

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, of all ranks."""

    def numel_of(self, part: Tensor) -> int:
        """Return the elements of the whole tensor of one of `tensors`."""

    @property
    def matrices(self) -> Matrices:
        """`tensors` as parts of matrices."""


class WeightEma:
    """Exponential moving average of weights, starting from their present values."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Copy `weights` in float32; a `decay` of 0 keeps none."""
        self._weights, self._decay = dict(weights), decay
        self.tensors: dict[str, Tensor] = {}
        """By parameter name, float32; empty for a `decay` of 0."""
        if decay:
            copies = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in weights.items()}
            self.tensors = copies

    @torch.no_grad()
    def update(self) -> None:
        """Set EMA = decay * EMA + (1 - decay) * weights."""
        for name, tensor in self.tensors.items():
            tensor.lerp_(self._weights[name].to(tensor.dtype), 1.0 - self._decay)


class ModelOptimizer:
    """Applies the gradients of a model's trainable parameters.

    Parameters of fewer than 32 bits are trained through masters; see `starling.policy.train.optim.masters`, also for
    memory use. Frozen parameters are ignored.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: OptimizerSettings,
        total_steps: int,
        *,
        device: torch.device | None = None,
        shards: Callable[[Mapping[str, Tensor]], Shards] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Start at step 1 of `total_steps`, with moments of 0.

        Args:
            model: its trainable parameters are changed in place.
            settings: kind, schedule, decay and clipping.
            total_steps: planned number of steps; decides the decay of the learning rate.
            device: of moments and updates, and of masters where there are no `shards`; by default each parameter's own.
            shards: takes this rank's parts of tensors that are on a mesh; None where each is whole.
            names: of all trainable parameters, where other ranks have some of them; patterns must match one of these.

        Raises:
            ConfigError: `total_steps` is negative, no parameter of the model is trainable, a pattern of the settings
                matches none of them, or the optimizer's package is not installed.
        """
        if total_steps < 0:
            raise ConfigError(f"total_steps is {total_steps}: it must be 0 or more")
        self.num_steps = 0
        self.total_steps = total_steps
        self._settings = settings
        self._masters = Masters(_trainable(model), device if shards is None else None)
        self._shards = None if shards is None else shards(self._masters.trained)
        self._completed = self._masters.trained if self._shards is None else self._shards.tensors
        self._moved = None
        if self._shards is not None and device is not None:
            self._moved = Masters(self._completed, device, backward=False)
        self._trained = self._completed if self._moved is None else self._moved.trained
        self._kept: tuple[dict[str, Tensor], int] | None = None
        self._ema = WeightEma(self._trained, settings.ema_decay)
        self._optimizers = _optimizers(model, self._trained, settings, names, self._shards)

    @property
    def ema(self) -> Mapping[str, Tensor]:
        """Average of the weights, float32, by name of the trainable parameter; empty without one."""
        return self._ema.tensors

    def clear(self) -> None:
        """Discard the gradients, before the first microbatch of a step."""
        self._masters.clear()
        if self._shards is not None:
            self._shards.clear()
        if self._moved is not None:
            self._moved.clear()
        for tensor in self._trained.values():
            tensor.grad = None

    def apply(self, loss: float, settings: OptimizerSettings | None = None, *, ends_step: bool = True) -> UpdateResult:
        """Make one optimizer update from the accumulated gradients; without any, from a gradient of 0.

        The update is skipped if the norm of the gradient is not finite, or above 1e18 and not clipped, or if `loss`,
        the update's loss, is not finite: where a loss clamps its arguments, NaN in them gives a NaN loss with a
        gradient of 0. A skipped update still advances `num_steps`, because the schedule counts the steps of the run.
        `settings`, if given, overrides the learning rate with its schedule and the clipping of this update only.

        `ends_step`: whether this is the last update of its step; all updates of a step have the same learning rate.

        Raises PeersLostError if other replicas that make the step are lost; nothing has changed then.
        """
        settings = settings or self._settings
        rate = learning_rate(settings, self.num_steps + 1, self.total_steps)
        norm_tensor = self._complete_gradients()
        self.num_steps += ends_step
        norm, bound = float(norm_tensor), settings.max_grad_norm
        if not (math.isfinite(norm) and math.isfinite(loss)) or (bound == 0.0 and norm > _MOST_UNCLIPPED):
            return UpdateResult(norm, rate, skipped=True)
        if 0.0 < bound < norm:
            torch.nn.utils.clip_grads_with_norm_(self._trained.values(), bound, norm_tensor)
        for optimizer in self._optimizers:
            _set_rate(optimizer, rate)
            optimizer.step()
        self._write()
        self._ema.update()
        return UpdateResult(norm, rate, skipped=False)

    def _complete_gradients(self) -> Tensor:
        """Give the trained tensors the gradient of the whole update. Returns its norm."""
        self._masters.gather()
        if self._shards is not None:
            self._shards.gather()
        completed = self._completed.values()
        gradients = [tensor.grad for tensor in completed if tensor.grad is not None]
        if not gradients:
            for tensor in completed:
                tensor.grad = torch.zeros_like(tensor)
        if self._shards is None:
            return total_norm(gradients).float() if gradients else torch.zeros(())
        norm = self._shards.norm()
        if self._moved is not None:
            self._moved.gather()
        return norm

    def _write(self) -> None:
        """Bring the weights of the model in line with the trained tensors."""
        if self._moved is not None:
            self._moved.write()
        self._masters.write()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return everything that the next updates depend on besides the weights, `num_steps` and the settings.

        The tensors are this object's own and exist from the start: writing into them changes it. Their names are
        ``<field>:<parameter>``, with the fields ``step``, ``exp_avg``, ``exp_avg_sq`` of AdamW (``exp_avg.codes``,
        uint8, and ``exp_avg.scale`` of 8 bits, likewise of ``exp_avg_sq``), ``momentum`` of Muon, ``master``, ``ema``.
        """
        found = {f"master:{name}": tensor for name, tensor in self._masters.tensors.items()}
        found |= {f"ema:{name}": tensor for name, tensor in self._ema.tensors.items()}
        names = {tensor: name for name, tensor in self._trained.items()}
        for optimizer in self._optimizers:
            for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
                for field, value in optimizer.state[tensor].items():
                    found |= {f"{part}:{names[tensor]}": held for part, held in plain_tensors(field, value)}
        return found

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore, bit for bit, the `state_tensors` of a run with the same model and settings.

        The model must already have its weights of that moment. The device of the updates may differ.

        Raises:
            ConfigError: the tensors are of other settings or of another model. Nothing has changed.
        """
        live = self.state_tensors()
        difference = _difference(tensors, live)
        if difference is not None:
            raise ConfigError(
                f"the saved state of the optimizer does not fit: {difference}; "
                "use the optimizer settings and the model of that run"
            )
        for name, tensor in live.items():
            tensor.copy_(tensors[name])
        self.restored()

    @torch.no_grad()
    def keep(self) -> None:
        """Keep a copy of everything that updates change, for `rewind`."""
        self._kept = {name: tensor.clone() for name, tensor in self._changing().items()}, self.num_steps

    @torch.no_grad()
    def rewind(self) -> None:
        """Undo the updates since `keep`, bit for bit."""
        assert self._kept is not None, "keep() comes before the updates"
        copies, self.num_steps = self._kept
        for name, tensor in self._changing().items():
            tensor.copy_(copies[name])
        self._write()

    def forget(self) -> None:
        """Free what was kept."""
        self._kept = None

    def _changing(self) -> dict[str, Tensor]:
        return {**{f"weight:{name}": tensor for name, tensor in self._trained.items()}, **self.state_tensors()}

    def restored(self) -> None:
        """Bring the weights in line with `state_tensors`, after those were written into."""
        self._masters.read()
        if self._moved is not None:
            self._moved.read()
        self._masters.write()


def check_optimizers(
    model: torch.nn.Module, settings: PolicySettings, kind: TrainerKind, names: Sequence[str] | None = None
) -> None:
    """Check the optimizer settings of a run that ends with steps of `kind`, before its first one. Changes nothing.

    `names`: of all trainable parameters, where other ranks have some of them.

    Raises:
        ConfigError: an optimizer's pattern matches no trainable parameter, or its package is not installed.
    """
    if kind == "rl":
        check_optimizer(model, settings.optimizer, "policy.optimizer", names)
    # Supervised steps may precede reinforcement learning; their defaults fit every model.
    if kind in ("rl", "sft"):
        check_optimizer(model, settings.sft.optimizer, "policy.sft.optimizer", names)
    elif kind == "dpo":
        check_optimizer(model, settings.dpo.optimizer, "policy.dpo.optimizer", names)
    else:
        check_optimizer(model, settings.reward_model.optimizer, "policy.reward_model.optimizer", names)


def check_optimizer(
    model: torch.nn.Module, settings: OptimizerSettings, key: str, names: Sequence[str] | None = None
) -> None:
    """Check `settings`, the section `key` of a recipe, against `model`; for `names` see `check_optimizers`.

    Raises:
        ConfigError: as `ModelOptimizer`, with the key in the message.
    """
    trained = _trainable(model)
    rate_factors(trained, settings, key, names=names)
    weight_decays(trained, settings, key, names=names)
    if settings.kind == "adamw_8bit":
        import_adamw_8bit(key)


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ConfigError("the model has no trainable parameter: unfreeze at least one")
    return parameters


def _optimizers(
    model: torch.nn.Module,
    trained: Mapping[str, Tensor],
    settings: OptimizerSettings,
    names: Sequence[str] | None,
    shards: Shards | None,
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that together update the `trained` tensors."""
    copies = {} if shards is None else shards.copies
    originals = {name: tensor for name, tensor in trained.items() if name not in copies}
    decays = weight_decays(originals, settings, names=names)
    factors = rate_factors(originals, settings, names=names)
    for copy, original in copies.items():
        decays[copy], factors[copy] = decays[original], factors[original]

    def groups(names: Iterable[str]) -> list[dict[str, Any]]:
        members: dict[tuple[float, float], list[Tensor]] = {}
        for name in names:
            members.setdefault((factors[name], decays[name]), []).append(trained[name])
        return [
            {"params": tensors, "lr": settings.learning_rate * factor, "factor": factor, "weight_decay": decay}
            for (factor, decay), tensors in members.items()
        ]

    if settings.kind == "adamw_8bit":
        if shards is None:
            return (adamw_8bit(groups(trained), settings),)
        parts = {tensor: shards.tensors[name] for name, tensor in trained.items()}
        return (adamw_8bit(groups(trained), settings, lambda tensor: shards.numel_of(parts[tensor])),)
    if settings.kind == "adamw":
        return (adamw(groups(trained), settings),)
    matrices = hidden_matrices(model, trained)
    others = [name for name in trained if name not in matrices]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        hidden = groups(name for name in trained if name in matrices)
        divided = None if shards is None else shards.matrices
        made.append(Muon(hidden, momentum=settings.momentum, matrices=divided))
    if others:
        made.append(adamw(groups(others), settings))
    return tuple(made)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's compiled update reads this very tensor
            group["lr"].fill_(rate * group["factor"])
        else:
            group["lr"] = rate * group["factor"]


def _difference(given: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> str | None:
    """Describe the first difference between two states, values aside."""
    for name in sorted(given.keys() | live.keys()):
        if name not in live:
            return f"it has {name}, which this optimizer does not have"
        if name not in given:
            return f"it has no {name}, which this optimizer has"
        there, here = given[name], live[name]
        if (there.dtype, there.shape) != (here.dtype, here.shape):
            return f"its {name} is {there.dtype} {list(there.shape)}, and this one's is {here.dtype} {list(here.shape)}"
    return None
