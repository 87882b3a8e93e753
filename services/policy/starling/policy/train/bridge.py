"""Gradients on their way to a master that is elsewhere, and weights on their way back."""

from __future__ import annotations

import torch
from torch import Tensor


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
