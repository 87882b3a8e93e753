"""Weights in float32 behind a model of fewer bits.

The spacing of bfloat16 numbers is a 128th to a 256th of their size, and a step of reinforcement learning changes a
weight by far less: rounded to bfloat16 each time, it would change nothing. So the optimizer works on masters in float32
and the model takes them rounded to nearest. Likewise a gradient summed in bfloat16 loses what small microbatches add.

    backward -> gradient in bfloat16 -> added to the master's in float32, and freed -> norm, bound, optimizer
             -> master -> rounded -> parameter

Bytes per parameter with AdamW: 2 of the model, 4 of the master, 4 of the gradient, 8 of the averages, which makes 18,
where a model in float32 takes 16; an average of the weights takes 4 more of both. A bfloat16 gradient lives for as long
as autograd takes to make that of one parameter. Averages of 8 bits take 2 bytes instead of 8, Muon's take 4.

Masters may be on another device than their parameters, those in float32 included: then all of this but the model's own
weights is there, with 2 bytes more for what crosses (4 of a model in float32), and the update is made there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

_LOW = frozenset({torch.bfloat16, torch.float16})

_hooks = WeakTensorKeyDictionary()
"""The hook on each parameter that moves its gradient. There is one only: the masters that came last take it."""


class Masters:
    """The tensors that an optimizer works on in place of a model's parameters: float32 for those of fewer bits."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], where: torch.device | None = None) -> None:
        """Copy the parameters of fewer than 32 bits; from now on, their gradients go to the copies.

        Args:
            parameters: trainable ones, by name. What is put into them later must be put into the masters too.
            where: the device of the masters, which every parameter has then; by default they are beside theirs.
        """
        self._parameters = {
            name: parameter for name, parameter in parameters.items() if where is not None or parameter.dtype in _LOW
        }
        masters = {name: _copy(parameter, where) for name, parameter in self._parameters.items()}
        self.tensors = {name: master for name, master in masters.items() if parameters[name].dtype in _LOW}
        """Those that say more than their parameters, by the name of the parameter."""
        self.trained: dict[str, Tensor] = {name: masters.get(name, parameter) for name, parameter in parameters.items()}
        """What the optimizer changes: the master of a parameter, or itself where it has none."""
        self._ways: dict[str, _Beside | Bridge] = {
            name: _Beside(masters[name]) if where is None else Bridge(parameter, masters[name])
            for name, parameter in self._parameters.items()
        }
        for name, parameter in parameters.items():
            _move_gradients(parameter, self._ways.get(name))

    def gather(self) -> None:
        """Let all gradients arrive, those too that were put into parameters otherwise than by a backward pass."""
        for name, way in self._ways.items():
            way.send(self._parameters[name])
            way.deliver()

    def clear(self) -> None:
        """Free the gradients, of masters and parameters."""
        for name, way in self._ways.items():
            self._parameters[name].grad = None
            way.drop()

    @torch.no_grad()
    def read(self) -> None:
        """Take those masters from their parameters that say no more than these."""
        for name, parameter in self._parameters.items():
            if name not in self.tensors:
                self.trained[name].copy_(parameter)

    def write(self) -> None:
        """Round the masters to nearest into their parameters."""
        for name, way in self._ways.items():
            way.write(self._parameters[name])


class _Beside:
    """The way between a parameter and a master on the same device."""

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
        """What was sent is there."""

    def drop(self) -> None:
        self._master.grad = None

    @torch.no_grad()
    def write(self, parameter: Tensor) -> None:
        parameter.copy_(self._master)


def _copy(parameter: Tensor, where: torch.device | None) -> Tensor:
    dtype = torch.float32 if parameter.dtype in _LOW else parameter.dtype
    return parameter.detach().to(where or parameter.device, dtype, copy=True)


def _move_gradients(parameter: torch.nn.Parameter, way: _Beside | Bridge | None) -> None:
    """Let every backward pass send the gradient of `parameter` along `way`, or leave it, and along no other."""
    former: RemovableHandle | None = _hooks.pop(parameter, None)  # type: ignore[no-untyped-call]
    if former is not None:
        former.remove()
    if way is not None:
        _hooks[parameter] = parameter.register_post_accumulate_grad_hook(way.send)  # type: ignore[no-untyped-call]


# JOINED from starling.policy.train.bridge: Gradients on their way to a master that is elsewhere, and weights
# on their way back.


class Bridge:
    """What one parameter and its master on another device exchange; on a CPU, through page-locked memory.

    The gradient of a microbatch is copied in the order of the stream that computed it: nobody waits for that, and the
    memory that it frees is at hand for what is computed next. It is added to the sum when the next one comes or the sum
    is wanted, and has been there for long by then. The parameter itself is not kept: its hook keeps the bridge.
    """

    def __init__(self, parameter: Tensor, master: Tensor) -> None:
        """Prepare the memory: of the parameter's type for what crosses, of the master's for the sum of gradients."""
        self._master = master
        locked = parameter.is_cuda and master.device.type == "cpu"
        self._buffer = torch.empty(parameter.shape, dtype=parameter.dtype, device=master.device, pin_memory=locked)
        # Kept over steps: so much memory takes the CPU longer to get than to fill.
        self._sum = torch.empty_like(master)
        self._copied = torch.cuda.Event() if parameter.is_cuda else None  # type: ignore[no-untyped-call]
        self._waiting = False

    def send(self, parameter: Tensor) -> None:
        """Take the gradient off `parameter`, if there is one, and let it cross."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self.deliver()
        self._copy(self._buffer, gradient.contiguous())
        self._waiting = True

    def deliver(self) -> None:
        """Add what has crossed to the master's gradient."""
        if not self._waiting:
            return
        self._settle()
        if self._master.grad is None:
            self._master.grad = self._sum.copy_(self._buffer)
        else:
            self._master.grad.add_(self._buffer)
        self._waiting = False

    def drop(self) -> None:
        """Forget the gradients."""
        self._waiting = False
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
