"""Master weights in float32 for parameters of fewer bits.

bfloat16 numbers are spaced by a 128th to a 256th of their size, and a step of reinforcement learning changes a weight
by far less: rounded to bfloat16 each time, the weight would never change. So the optimizer works on masters in float32,
which are rounded to nearest into the model. Likewise a gradient summed in bfloat16 loses small microbatches.

    backward -> gradient in bfloat16 -> added to the master's in float32, and freed -> norm, clip, optimizer
             -> master -> rounded -> parameter

Bytes per parameter with AdamW: 2 of the model, 4 of the master, 4 of the gradient, 8 of the moments: 18, where a model
in float32 takes 16; an EMA of the weights takes 4 more in both cases. A bfloat16 gradient lives only until autograd
has passed it on. Averages of 8 bits take 2 bytes instead of 8, Muon's take 4.

Masters may be on another device than their parameters, also those of float32 parameters: then that device holds all of
this but the model's own weights, with 2 bytes more for the copies in transit (4 for a model in float32), and makes the
updates. On a mesh ranks add up gradients where their devices communicate, so those stay on the device until then, as do
masters that FSDP makes its parameters; the other device holds what it needs for the updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

LOW: Final = frozenset({torch.bfloat16, torch.float16})
"""Types of parameters that have masters."""

_hooks = WeakTensorKeyDictionary()
"""The hook on each parameter that moves its gradient. There is only one: the newest masters replace it."""


class Masters:
    """The tensors that an optimizer updates in place of a model's parameters: float32 for those of fewer bits."""

    def __init__(
        self, parameters: Mapping[str, Tensor], device: torch.device | None = None, *, backward: bool = True
    ) -> None:
        """Copy the parameters of fewer than 32 bits; from now on, their gradients go to the copies.

        Args:
            parameters: trainable ones, by name. A later write into one must also go into its master.
            device: of the masters, which every parameter then has; by default each is on its parameter's device.
            backward: whether a backward pass gives the parameters their gradients, which then leave them at once;
                otherwise they leave in `gather`.
        """
        self._parameters = {
            name: parameter for name, parameter in parameters.items() if device is not None or parameter.dtype in LOW
        }
        masters = {name: _copy(parameter, device) for name, parameter in self._parameters.items()}
        self.tensors = {name: master for name, master in masters.items() if parameters[name].dtype in LOW}
        """Masters with more bits than their parameters, by parameter name."""
        self.trained: dict[str, Tensor] = {name: masters.get(name, parameter) for name, parameter in parameters.items()}
        """Tensors that the optimizer updates: the master of each parameter, or the parameter where it has none."""
        self._links: dict[str, _LocalLink | _DeviceLink] = {
            name: _LocalLink(masters[name]) if device is None else _DeviceLink(parameter, masters[name])
            for name, parameter in self._parameters.items()
        }
        if backward:
            for name, parameter in parameters.items():
                _move_gradients(parameter, self._links.get(name))

    def gather(self) -> None:
        """Complete the transfer of all gradients, including those that no backward pass put into parameters."""
        for name, link in self._links.items():
            link.send(self._parameters[name])
            link.deliver()

    def clear(self) -> None:
        """Free the gradients of masters and parameters."""
        for name, link in self._links.items():
            self._parameters[name].grad = None
            link.drop()

    @torch.no_grad()
    def read(self) -> None:
        """Copy parameters into those masters that have no more bits than they."""
        for name, parameter in self._parameters.items():
            if name not in self.tensors:
                self.trained[name].copy_(parameter)

    def write(self) -> None:
        """Round the masters to nearest into their parameters."""
        for name, link in self._links.items():
            link.write(self._parameters[name])


class _LocalLink:
    """Gradient and weight transfer between a parameter and a master on the same device."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def send(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if self._master.grad is None:
            self._master.grad = gradient.float()
        else:
            self._master.grad.add_(gradient)

    def deliver(self) -> None:
        """Do nothing: `send` has delivered already."""

    def drop(self) -> None:
        self._master.grad = None

    @torch.no_grad()
    def write(self, parameter: Tensor) -> None:
        parameter.copy_(self._master)


class _DeviceLink:
    """Gradient and weight transfer between a parameter and a master on another device; to a CPU by pinned memory.

    The gradient of a microbatch is copied in the order of the stream that computed it: nothing waits for the copy, and
    the memory that it frees can be used by the next computation. It is added to the sum when the next gradient comes or
    the sum is needed, long after it has arrived. The link does not hold the parameter: the parameter's hook holds the
    link.
    """

    def __init__(self, parameter: Tensor, master: Tensor) -> None:
        """Allocate the transfer buffer in the parameter's type, and the sum of gradients in the master's."""
        self._master = master
        pinned = parameter.is_cuda and master.device.type == "cpu"
        self._buffer = torch.empty(parameter.shape, dtype=parameter.dtype, device=master.device, pin_memory=pinned)
        # Kept over steps: allocating so much memory takes the CPU longer than filling it.
        self._sum = torch.empty_like(master)
        self._copied = torch.cuda.Event() if parameter.is_cuda else None  # type: ignore[no-untyped-call]
        self._in_transit = False

    def send(self, parameter: Tensor) -> None:
        """Start to copy the gradient of `parameter`, if there is one, and remove it from there."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self.deliver()
        self._copy(self._buffer, gradient.contiguous())
        self._in_transit = True

    def deliver(self) -> None:
        """Add the gradient in transit to the master's."""
        if not self._in_transit:
            return
        self._settle()
        if self._master.grad is None:
            self._master.grad = self._sum.copy_(self._buffer)
        else:
            self._master.grad.add_(self._buffer)
        self._in_transit = False

    def drop(self) -> None:
        """Discard the gradients."""
        self._in_transit = False
        self._master.grad = None

    @torch.no_grad()
    def write(self, parameter: Tensor) -> None:
        """Round the master to nearest into `parameter`."""
        self.deliver()
        self._settle()
        self._buffer.copy_(self._master)
        self._copy(parameter, self._buffer)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._copied is None:
            target.copy_(source)
            return
        target.copy_(source, non_blocking=True)
        device = source.device if source.is_cuda else target.device
        self._copied.record(torch.cuda.current_stream(device))

    def _settle(self) -> None:
        """Wait until the last copy is complete: only then may the CPU read or change the buffer."""
        if self._copied is not None:
            self._copied.synchronize()


def _copy(parameter: Tensor, device: torch.device | None) -> Tensor:
    dtype = torch.float32 if parameter.dtype in LOW else parameter.dtype
    return parameter.detach().to(device or parameter.device, dtype, copy=True)


def _move_gradients(parameter: Tensor, link: _LocalLink | _DeviceLink | None) -> None:
    """Replace the hook of `parameter`: every backward pass sends its gradient over `link`, or leaves it in place."""
    former: RemovableHandle | None = _hooks.pop(parameter, None)  # type: ignore[no-untyped-call]
    if former is not None:
        former.remove()
    if link is not None:
        _hooks[parameter] = parameter.register_post_accumulate_grad_hook(link.send)  # type: ignore[no-untyped-call]
