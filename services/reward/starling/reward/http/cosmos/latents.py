"""Attributes of latents that clients of Cosmos-RL announce. They are checked, and do not change the decoder.

Which decoder reads latents, and on which device, is for the settings of the service to say: a client that could name a
file of weights could have any file read.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from starling.reward.http.errors import HttpError

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Text = Annotated[str, msgspec.Meta(max_length=1000)]


class LatentAttributes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of `latent_attr`; None for what is not said."""

    chunk_duration: _Count | None = None
    load_mean_std: bool | None = None
    vae_pth: _Text | None = None
    temporal_window: _Count | None = None
    device: _Text | None = None
    fps: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    num_frames: _Count | None = None
    height: _Count | None = None
    width: _Count | None = None

    @property
    def names(self) -> list[str]:
        """The fields that are said."""
        return [name for name in self.__struct_fields__ if getattr(self, name) is not None]


def read_attributes(text: str) -> LatentAttributes:
    """Read the field `fields` of the form. Raises HttpError."""
    try:
        return msgspec.json.decode(text, type=LatentAttributes)
    except (ValueError, RecursionError) as error:  # msgspec's errors are such, too
        raise HttpError(422, f"`fields` are no attributes of latents: {str(error)[:200]}") from None
