"""Limits on the size of a group, by the recipe: what the controller holds and journals of it is bounded by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starling.algo.routing import routing_bytes
from starling.common.ids import Role
from starling.common.ranges import MAX_TOKENS
from starling.common.wire.codec import MAX_ENVELOPE_BYTES, MAX_MESSAGE_BYTES
from starling.common.wire.messages import GroupGenerated, ModelLimits, TensorMeta, TrajectoryMeta
from starling.common.wire.tensors import CONDITION_FORMS, GROUP_TENSORS, MASK_FORM, PROMPT_TENSORS, STORED_BYTES

TOKEN_BYTES: Final = sum(form.item_bytes for form in GROUP_TENSORS[1:]) + MASK_FORM.item_bytes + 4
"""Bytes of a token of a completion: of its id, log-probability, version, mask, and number of kept tokens."""
PROMPT_TOKEN_BYTES: Final = 4
MESSAGE_BYTES: Final = MAX_MESSAGE_BYTES + MAX_ENVELOPE_BYTES
UNLIMITED: Final = 1 << 62
MAX_TIED: Final = 64
"""Tokens that truncation keeps beyond twice `sampling.top_k`: engines may keep all that are as likely as the last."""
_OF_PROMPTS: Final = frozenset({*PROMPT_TENSORS, *CONDITION_FORMS})
OF_TRAINING: Final = "generate:t"
"""Beginning of the leases that generate the groups of steps."""


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What the recipe allows in a group."""

    num_completions: int
    longest: int = 0
    """Tokens of a prompt with one of its completions, as `rollout.max_model_len`; 0 if the recipe does not say it."""
    media_bytes: int = 0
    """Tensors of a prompt's images and videos, as `rollout.max_media_bytes`; 0 if the recipe does not say it."""
    teacher_top_k: int | None = None
    """Likeliest tokens of a teacher at each position, as `teacher.top_k`; None if the recipe does not say it."""

    def group_problem(self, message: GroupGenerated, model: ModelLimits | None) -> str:
        """Return why a group, whose tensors have the right forms, is larger than allowed; empty if it is not.

        The context of the model that is trained bounds only the groups of steps. `model`: None if it is not known.
        """
        trained = model.longest if model is not None and message.lease.startswith(OF_TRAINING) else 0
        prompt_tokens, completion_tokens = message.tensors[0].shape[0], message.tensors[1].shape[0]
        return (
            self._length_problem(message.trajectories, prompt_tokens, completion_tokens, trained)
            or (len(message.tensors) > len(GROUP_TENSORS) and self._media_problem(message.tensors))
            or ""
        )

    def teacher_problem(self, tensors: Sequence[TensorMeta]) -> str:
        """Return why a teacher's tensors are larger than allowed; empty if they are not."""
        most_tokens = self.num_completions * (self.longest or MAX_TOKENS)
        for tensor in tensors:
            if tensor.shape and tensor.shape[0] > most_tokens:
                return f"its teacher scored {tensor.shape[0]} tokens, and a group has at most {most_tokens}"
            if self.teacher_top_k is not None and len(tensor.shape) > 1 and tensor.shape[1] > self.teacher_top_k:
                return (
                    f"its teacher sent the {tensor.shape[1]} likeliest tokens at each position, and teacher.top_k is "
                    f"{self.teacher_top_k}"
                )
        return ""

    def message_bytes(self, model: ModelLimits | None, num_kept: int, *, is_routed: bool = False) -> dict[Role, int]:
        """Return how many bytes a message with a group may have, by the role that sends it.

        Args:
            model: None if it is not known; then its images are not, and its context is not unless the recipe says it.
            num_kept: tokens that truncation keeps for each token; 0 if they are not recorded.
            is_routed: whether the experts of each token are recorded.
        """
        longest = self.longest or (model.longest if model is not None else 0)
        if not longest:
            return {"rollout": UNLIMITED, "teacher": UNLIMITED}
        num_tokens = self.num_completions * longest
        form = None if model is None else model.denoising
        reads_media = model is None or model.media is not None or form is not None
        media = (self.media_bytes or UNLIMITED) if reads_media else 0
        if form is not None:
            media += self.num_completions * (form.num_states + 1) * math.prod(form.latents) * STORED_BYTES[form.dtype]
        rollout = PROMPT_TOKEN_BYTES * longest + (TOKEN_BYTES + 4 * num_kept) * num_tokens + media
        if is_routed:
            experts = None if model is None else model.experts
            rollout += UNLIMITED if experts is None else routing_bytes(experts, longest + num_tokens)
        teacher = UNLIMITED if self.teacher_top_k is None else (4 + 8 * self.teacher_top_k) * num_tokens
        return {"rollout": rollout + MESSAGE_BYTES, "teacher": teacher + MESSAGE_BYTES}

    def _length_problem(
        self, trajectories: Sequence[TrajectoryMeta], prompt_tokens: int, completion_tokens: int, trained: int
    ) -> str:
        if len(trajectories) > self.num_completions:
            return f"{len(trajectories)} completions came, and a group has at most {self.num_completions}"
        longest = self.longest or MAX_TOKENS
        if trained:
            longest = min(longest, trained)
        # Nearly always the sum of all is within the limit already.
        if prompt_tokens + completion_tokens <= longest:
            return ""
        most = prompt_tokens + max([one.num_tokens for one in trajectories], default=0)
        if most <= longest:
            return ""
        whose = "the model can attend to" if longest == trained else "rollout.max_model_len allows"
        if not trained and not self.longest:
            whose = "a sequence can have"
        return (
            f"it has a sequence of {most} tokens, {prompt_tokens} of them of its prompt, and {whose} {longest}: "
            "shorten the prompts, what the environment adds, or sampling.max_tokens"
        )

    def _media_problem(self, tensors: Sequence[TensorMeta]) -> str:
        size_bytes = sum([tensor.nbytes for tensor in tensors if tensor.name in _OF_PROMPTS])
        if not self.media_bytes or size_bytes <= self.media_bytes:
            return ""
        return (
            f"the images and videos of its prompt, or its embeddings, take {size_bytes} bytes, and "
            f"rollout.max_media_bytes is {self.media_bytes}: raise it, or give smaller ones"
        )
