"""State of a replica that joins: copied from one that is there, rank by rank, both having the same mesh.

The one that joins asks for one section of a state after the other (see `starling.policy.train.checkpoint.state`), as it
would read them from a file. Nothing is copied on the other side, which makes no step meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from starling.policy.train.checkpoint.header import StateHeader, decode_header, encode_header
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.checkpoint.state import RANDOM, random_states, restore_random
from starling.policy.train.errors import PeersLostError
from starling.policy.train.parallel.replicas.peers import PeerGroup

END: Final = ""
"""Section that ends the transfer."""


def send_state(header: StateHeader, tensors: Mapping[str, Tensor], device: torch.device, group: PeerGroup) -> None:
    """Send the state of this rank to its counterpart, which makes a `ReceivedState` of it.

    Args:
        header: of the state.
        tensors: by section and name.
        device: whose generator of random numbers is included.
        group: of the two, this one first.

    Raises:
        PeersLostError: the other one is lost, or its tensors are others.
    """
    group.gather(encode_header(header).decode())
    names = list(tensors)
    group.gather(names)
    tensors = {**tensors, **random_states(device)}
    while (section := group.gather(None)[1]) != END:
        _copy(group, {name: tensor for name, tensor in tensors.items() if name.startswith(section)})


class ReceivedState:
    """The state of another replica, to be restored as a saved one is."""

    def __init__(self, group: PeerGroup) -> None:
        """Begin to receive. `group`: of the two, this one second. Raises PeersLostError."""
        self._group = group
        self.state = decode_header(group.gather(None)[0].encode())
        self._names: list[str] = group.gather(None)[0]

    @property
    def url(self) -> str:
        """Where it is from, for messages."""
        return "the other policy"

    def has(self, section: str) -> bool:
        """Return whether `section` has a tensor."""
        return any(name.startswith(section) for name in self._names)

    def restore_parts(self, section: str, parts: Mapping[str, Part], *, what: str, whole: bool) -> None:
        """Receive this rank's parts of the tensors of `section` into `parts`. Raises PeersLostError."""
        self._receive(section, {f"{section}{name}": part.local for name, part in parts.items()})

    def restore_random(self, device: torch.device) -> None:
        """Set the generators of random numbers."""
        states = random_states(device)
        self._receive(RANDOM, states)
        restore_random(self.state, {name.removeprefix(RANDOM): state for name, state in states.items()}, device)

    def end(self) -> None:
        """End the transfer."""
        self._group.gather(END)

    def _receive(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        self._group.gather(section)
        _copy(self._group, tensors)


@torch.no_grad()
def _copy(group: PeerGroup, tensors: Mapping[str, Tensor]) -> None:
    """Copy the first one's `tensors` into those of the other, in the order of their names."""
    ordered = sorted(tensors.items())
    own = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in ordered]
    sent, wanted = group.gather(own)
    if sent != wanted:
        first = next((pair for pair in zip(sent, wanted, strict=False) if pair[0] != pair[1]), (len(sent), len(wanted)))
        raise PeersLostError(f"the state does not fit: {first[0]} was sent, and {first[1]} is needed")
    for _, tensor in ordered:
        data = tensor.detach().contiguous()
        group.broadcast_(data.view(-1).view(torch.uint8))
        if group.place and data.data_ptr() != tensor.data_ptr():
            tensor.copy_(data)
