"""Reference model: the weights from which a KL term or a preference loss measures."""

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
    """The weights before the first step of a trainer, or those of the last reset; kept in memory only where needed.

    The reference is a separate model. For a model with adapters only the reference's adapters are kept; they are
    swapped in while the reference computes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        initial: Callable[[], PreTrainedModel] | None,
        given: PreTrainedModel | None = None,
        *,
        reload: bool = False,
        swapped: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep nothing yet but `given`.

        Args:
            model: that is trained.
            initial: loads version 0 again, for when `model` has changed.
            given: the reference, where the caller has it.
            reload: make a separate reference by `initial` and not as a copy, which a model on a mesh does not have.
            swapped: called each time after adapters of `model` were replaced.
        """
        self._model, self._initial = model, initial
        self._loads, self._swapped = initial if reload else None, swapped
        self._live = version_tensors(model)
        self._separate: PreTrainedModel | None = given
        self._adapters: dict[str, Tensor] | None = None
        self.version = -1
        """Version of the reference; -1 before the first step."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The reference's own tensors by name: writing into them changes it. Empty where it is not in memory."""
        if self._adapters is not None:
            return self._adapters
        return {} if self._separate is None else version_tensors(self._separate)

    @property
    def separate(self) -> PreTrainedModel | None:
        """The reference's own model, where it has one in memory."""
        return self._separate

    def begin(self, version: int) -> None:
        """Record that the first step changes `version`, which is the reference."""
        self.version = version

    def keep(self) -> Mapping[str, Tensor]:
        """Make the present weights the reference, whatever their version. Returns `tensors`."""
        if not self.tensors:
            if is_adapted(self._model):
                self._adapters = {name: tensor.detach().clone() for name, tensor in self._live.items()}
            else:
                self._separate = frozen_copy(self._model) if self._loads is None else self._loads()
        _copy(self._live, self.tensors)
        return self.tensors

    def prepare(self, step: int, *, required_by: str, reset_every: int = 0) -> None:
        """Make the reference of step `step` available.

        Args:
            step: number of the version to make.
            required_by: the setting that needs a reference, with its value.
            reset_every: versions after which the present weights become the reference; 0 for never.

        Raises:
            ConfigError: its weights are no longer available.
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
                self._separate = initial
        elif not self.tensors:
            raise ConfigError(
                f"{required_by} needs version {self.version}, with which these steps began, as its reference, and "
                "those weights are no longer available: leave the setting at 0, or start a run with it"
            )

    @contextmanager
    def computing(self) -> Iterator[PreTrainedModel]:
        """Lend the reference, without gradients.

        Run a forward pass of the trained model between this and the backward pass: a graph made before adapters were
        swapped no longer matches them.
        """
        with torch.no_grad():
            if self._adapters is None:
                assert self._separate is not None, "call prepare() first"
                yield self._separate
                return
            trained = {name: tensor.detach().clone() for name, tensor in self._live.items()}
            _copy(self._adapters, self._live)
            try:
                yield self._model
            finally:
                _copy(trained, self._live)
                self._swapped()


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])
