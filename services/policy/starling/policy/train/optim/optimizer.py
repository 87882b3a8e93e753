"""Gradients become the next weights: the optimizer with its schedule, its masters, and the bound on the gradient.

gradients -> norm -> skipped, where something is not finite -> bound -> learning rates -> optimizer
          -> rounded into the parameters, where those have fewer bits -> average of the weights
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.optim.adamw import adamw, adamw_8bit, import_adamw_8bit, plain_tensors
from starling.policy.train.optim.masters import Masters
from starling.policy.train.optim.muon import Muon, hidden_matrices
from starling.policy.train.optim.rates import first_matches, learning_rate


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer step did."""

    grad_norm: float
    """Euclidean norm of the whole gradient before it was scaled down."""
    learning_rate: float
    """Of parameters without a factor of their own."""
    skipped: bool
    """The gradient or the loss was not finite: weights and averages stayed as they were."""


class ModelOptimizer:
    """Turns the gradients of a model's trainable parameters into its next weights.

    Parameters of fewer than 32 bits are trained through masters; see `starling.policy.train.optim.masters`, also for
    the
    memory that everything takes. Frozen parameters have no part in any of this.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: OptimizerSettings,
        total_steps: int,
        *,
        where: torch.device | None = None,
    ) -> None:
        """Start at step 1 of `total_steps`, with empty averages.

        Args:
            model: its trainable parameters are changed in place.
            settings: what to do.
            total_steps: how many steps there will be; decides the decay of the learning rate.
            where: the device on which masters and averages are and updates are made; by default each parameter's own.

        Raises:
            ConfigError: `total_steps` is negative, no parameter of the model is trainable, a pattern of the settings
                matches none of them, or what the kind of optimizer needs is not installed.
        """
        if total_steps < 0:
            raise ConfigError(f"total_steps is {total_steps}: it must be 0 or more")
        self.num_steps = 0
        self.total_steps = total_steps
        self._settings = settings
        self._masters = Masters(_trainable(model), where)
        self._trained = self._masters.trained
        self._average = WeightAverage(self._trained, settings.ema_decay)
        self._optimizers = _optimizers(model, self._trained, settings)

    @property
    def ema(self) -> Mapping[str, Tensor]:
        """The average of the weights, float32, by the names of the trainable parameters; empty without one."""
        return self._average.tensors

    def clear(self) -> None:
        """Forget the gradients, before the first microbatch of a step."""
        self._masters.clear()
        for tensor in self._trained.values():
            tensor.grad = None

    def apply(self, loss: float, settings: OptimizerSettings | None = None, *, ends_step: bool = True) -> UpdateResult:
        """Make one optimizer update of the accumulated gradients; without any, of a gradient of 0.

        Skips the update when the norm of the gradient is not finite, or `loss`, the update's loss: where a loss clamps
        its arguments, NaN in them gives a NaN loss with a gradient of 0. Then `num_steps` alone goes on, for the
        schedule counts the steps of the run. Of `settings`, if given, this update takes the learning rate with its
        schedule, and the bound on the gradient.

        `ends_step` says that this is the last update of its step: all of a step have the same learning rate.
        """
        settings = settings or self._settings
        rate = learning_rate(settings, self.num_steps + 1, self.total_steps)
        self.num_steps += ends_step
        self._masters.gather()
        trained = self._trained.values()
        gradients = [tensor.grad for tensor in trained if tensor.grad is not None]
        if not gradients:
            for tensor in trained:
                tensor.grad = torch.zeros_like(tensor)
        norm_tensor = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        norm = float(norm_tensor)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            return UpdateResult(norm, rate, skipped=True)
        bound = settings.max_grad_norm
        if 0.0 < bound < norm:
            torch.nn.utils.clip_grads_with_norm_(trained, bound, norm_tensor)
        for optimizer in self._optimizers:
            _set_rate(optimizer, rate)
            optimizer.step()
        self._masters.write()
        self._average.update()
        return UpdateResult(norm, rate, skipped=False)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all that the next updates depend on besides the weights, `num_steps` and the settings.

        The tensors are this object's own, whole from the beginning on: what changes them changes it. Their names are
        ``<field>:<parameter>``, with the fields ``step``, ``exp_avg``, ``exp_avg_sq`` of AdamW (``exp_avg.codes``,
        uint8, and ``exp_avg.scale`` of 8 bits, likewise of ``exp_avg_sq``), ``momentum`` of Muon, ``master``, ``ema``.
        """
        found = {f"master:{name}": tensor for name, tensor in self._masters.tensors.items()}
        found |= {f"ema:{name}": tensor for name, tensor in self._average.tensors.items()}
        names = {tensor: name for name, tensor in self._trained.items()}
        for optimizer in self._optimizers:
            for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
                for field, value in optimizer.state[tensor].items():
                    found |= {f"{part}:{names[tensor]}": held for part, held in plain_tensors(field, value)}
        return found

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over, bit for bit, what `state_tensors` returned in a run with the same model and settings.

        The model has its weights of that moment already. Where the update is made may be another place than it was.

        Raises:
            ConfigError: the tensors are of other settings or of another model. Then nothing has changed.
        """
        live = self.state_tensors()
        difference = _difference(tensors, live)
        if difference is not None:
            raise ConfigError(
                f"the saved state of the optimizer does not fit: {difference}; "
                "give the optimizer's settings and the model of that run"
            )
        for name, tensor in live.items():
            tensor.copy_(tensors[name])
        self._masters.read()
        self._masters.write()


def check_optimizer(model: torch.nn.Module, settings: OptimizerSettings, key: str) -> None:
    """Find out whether `model` can be trained as `settings` say, which are called `key` in a recipe.

    Raises:
        ConfigError: as `ModelOptimizer` does, with the key in it.
    """
    trained = _trainable(model)
    _factors(trained, settings, key)
    _decays(trained, settings, key)
    if settings.kind == "adamw_8bit":
        import_adamw_8bit(key)


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ConfigError("the model has no trainable parameter: unfreeze at least one")
    return parameters


def _optimizers(
    model: torch.nn.Module, trained: Mapping[str, Tensor], settings: OptimizerSettings
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that share the `trained` tensors between them."""
    decays = _decays(trained, settings)
    factors = _factors(trained, settings)

    def groups(names: Iterable[str]) -> list[dict[str, Any]]:
        members: dict[tuple[float, float], list[Tensor]] = {}
        for name in names:
            members.setdefault((factors[name], decays[name]), []).append(trained[name])
        return [
            {"params": tensors, "lr": settings.learning_rate * factor, "factor": factor, "weight_decay": decay}
            for (factor, decay), tensors in members.items()
        ]

    if settings.kind == "adamw_8bit":
        return (adamw_8bit(groups(trained), settings),)
    if settings.kind == "adamw":
        return (adamw(groups(trained), settings),)
    matrices = hidden_matrices(model, trained)
    others = [name for name in trained if name not in matrices]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(groups(name for name in trained if name in matrices), momentum=settings.momentum))
    if others:
        made.append(adamw(groups(others), settings))
    return tuple(made)


def _factors(trained: Mapping[str, Tensor], settings: OptimizerSettings, key: str = "optimizer") -> dict[str, float]:
    """Return the factor on the learning rate of each parameter. `key`: the settings' name in an error."""
    patterns = first_matches([*settings.rates], trained, f"{key}.rates")
    return {name: settings.rates[patterns[name]] if name in patterns else 1.0 for name in trained}


def _decays(trained: Mapping[str, Tensor], settings: OptimizerSettings, key: str = "optimizer") -> dict[str, float]:
    """Return the weight decay of each parameter: none of vectors, of biases (stacked ones too), and of those chosen."""
    spared = {name for pattern in settings.no_decay for name in first_matches([pattern], trained, f"{key}.no_decay")}
    return {
        name: 0.0 if tensor.dim() < 2 or name.endswith("bias") or name in spared else settings.weight_decay
        for name, tensor in trained.items()
    }


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # What torchao compiled reads it from where it is.
            group["lr"].fill_(rate * group["factor"])
        else:
            group["lr"] = rate * group["factor"]


def _difference(given: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> str | None:
    """Say the first thing in which two states differ, but for their values."""
    for name in sorted(given.keys() | live.keys()):
        if name not in live:
            return f"it has {name}, which this optimizer has not"
        if name not in given:
            return f"it has no {name}, which this optimizer has"
        there, here = given[name], live[name]
        if (there.dtype, there.shape) != (here.dtype, here.shape):
            return f"its {name} is {there.dtype} {list(there.shape)}, and this one's is {here.dtype} {list(here.shape)}"
    return None


# JOINED from starling.policy.train.ema: An average of the weights, kept beside them.


class WeightAverage:
    """The exponential moving average of weights, which begins as they are."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Copy `weights`, in float32, unless `decay` is 0: then there is no average."""
        self._weights, self._decay = dict(weights), decay
        self.tensors: dict[str, Tensor] = {}
        """By the name of the parameter, float32; empty without an average."""
        if decay:
            copies = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in weights.items()}
            self.tensors = copies

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are: average = decay * average + (1 - decay) * weights."""
        for name, tensor in self.tensors.items():
            tensor.lerp_(self._weights[name].to(tensor.dtype), 1.0 - self._decay)


# JOINED from starling.policy.train.check: What only the model shows to be wrong in the settings: said before
# the first step.


def check_optimizers(
    model: torch.nn.Module, settings: PolicySettings, kind: Literal["rl", "sft", "dpo", "reward_model"]
) -> None:
    """Find out whether the steps of a run of `kind` can be made of `model`. Changes nothing.

    Raises:
        ConfigError: an optimizer's pattern matches no trainable parameter, or what its kind needs is not installed.
    """
    if kind == "rl":
        check_optimizer(model, settings.optimizer, "policy.optimizer")
    # Supervised steps may come before reinforcement learning; their defaults hold for every model.
    if kind in ("rl", "sft"):
        check_optimizer(model, settings.sft.optimizer, "policy.sft.optimizer")
    elif kind == "dpo":
        check_optimizer(model, settings.dpo.optimizer, "policy.dpo.optimizer")
    else:
        check_optimizer(model, settings.reward_model.optimizer, "policy.reward_model.optimizer")
