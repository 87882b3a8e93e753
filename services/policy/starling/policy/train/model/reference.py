"""The model against which a KL term or a preference is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.train.model.load import frozen_copy, version_tensors
from starling.weightsync.tensors.adapters import is_adapted

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module


class ReferenceModel:
    """The weights with which steps of a kind began, or those of the last reset; kept only where they are needed.

    They are a model of their own. Where a model is trained through adapters only the reference's adapters are kept, and
    take the place of the trained ones for as long as it computes.
    """

    def __init__(
        self, model: PreTrainedModel, initial: Callable[[], PreTrainedModel] | None, kept: PreTrainedModel | None = None
    ) -> None:
        """Keep nothing yet but `kept`.

        Args:
            model: that is trained.
            initial: loads version 0 again, for when that is no longer what `model` holds.
            kept: the reference, where it is known already.
        """
        self._model, self._initial = model, initial
        self._live = version_tensors(model)
        self._apart: PreTrainedModel | None = kept
        self._adapters: dict[str, Tensor] | None = None
        self.version = -1
        """The version that it is; -1 before the first step."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What makes it up, by name, its own: writing into it changes the reference. Empty where it is not kept."""
        if self._adapters is not None:
            return self._adapters
        return {} if self._apart is None else version_tensors(self._apart)

    def begin(self, version: int) -> None:
        """Note that the first step changes `version`, which is the reference."""
        self.version = version

    def keep(self) -> Mapping[str, Tensor]:
        """Make the present weights the reference, whatever their version. Returns `tensors`."""
        if not self.tensors:
            if is_adapted(self._model):
                self._adapters = {name: tensor.detach().clone() for name, tensor in self._live.items()}
            else:
                self._apart = frozen_copy(self._model)
        _copy(self._live, self.tensors)
        return self.tensors

    def prepare(self, step: int, *, wanted_by: str, reset_every: int = 0) -> None:
        """See to it that the reference of step `step` is here.

        Args:
            step: numbers the version that is to be made.
            wanted_by: the setting that needs a reference, with its value.
            reset_every: versions after which the present weights become the reference; 0 for never.

        Raises:
            ConfigError: nobody has it any more.
        """
        if reset_every and step - 1 - self.version >= reset_every:
            self.version = step - 1
            self.keep()
        elif not self.tensors and self.version == step - 1:
            self.keep()
        elif not self.tensors and self.version == 0 and self._initial is not None:
            initial = self._initial()
            if is_adapted(initial):
                self._adapters = {name: tensor.detach().clone() for name, tensor in version_tensors(initial).items()}
            else:
                self._apart = initial
        elif not self.tensors:
            raise ConfigError(
                f"{wanted_by} needs version {self.version} as its reference, with which these steps began, and "
                "nobody kept it: leave it at 0, or begin a run with it"
            )

    @contextmanager
    def computing(self) -> Iterator[PreTrainedModel]:
        """Lend the reference, without gradients.

        Between this and the backward pass there must be a forward pass of the trained model: where adapters take each
        other's place, a graph that was made before would no longer fit.
        """
        with torch.no_grad():
            if self._adapters is None:
                assert self._apart is not None, "prepare() comes first"
                yield self._apart
                return
            trained = {name: tensor.detach().clone() for name, tensor in self._live.items()}
            _copy(self._adapters, self._live)
            try:
                yield self._model
            finally:
                _copy(trained, self._live)


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])
