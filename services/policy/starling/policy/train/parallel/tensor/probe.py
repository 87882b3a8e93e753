"""Comparison of a divided model with the whole one, on a few tokens: their hidden states, and a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.probe import PROBE, is_close, probe_tokens
from starling.common.errors import ConfigError
from starling.policy.train.model.attention import structured
from starling.policy.train.model.layout import AttentionPlan, hidden_and_gradient
from starling.policy.train.model.lm_head import (
    find_lm_head,
)
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.tensor.divide import TOKENS

_ROUNDED: Final = 0.5
"""Largest difference in low precision, relative to the largest number: one of a wrong matrix is larger."""


class TensorProbe:
    """Results of a whole model on a few tokens, with which those of the divided one are compared."""

    def __init__(self, model: Any, plan: AttentionPlan, mesh: Mesh, *, rounds: bool = False) -> None:
        """Compute them.

        Args:
            model: which is whole.
            plan: of its attention, by segments.
            mesh: of the ranks.
            rounds: whether it computes in low precision, where results depend on what a rank has.

        Raises:
            ConfigError: only the model's own code can compute its logits.
        """
        scores = model.get_output_embeddings() is None
        if not scores and find_lm_head(model) is None:
            raise ConfigError(
                f"policy.parallel.tp = {mesh.size('tp')} needs an output layer that is a plain matrix, and that of "
                f"{type(model).__name__} is none: set it to 1, and use dp_shard"
            )
        self._plan, self._mesh, self._tolerance = plan, mesh, _ROUNDED if rounds else None
        # Where each rank goes on with a part of the vocabulary, the gradients of all ranks are added.
        self._share = 1.0 if scores else 1.0 / mesh.size("tp")
        self._expected = list(self._results(model, share=1.0))

    def check(self, model: Any) -> None:
        """Compare the hidden states and a gradient of the divided `model`; all ranks call this.

        Raises:
            ConfigError: they differ.
        """
        size, rank = self._mesh.size("tp"), self._mesh.place("tp")
        try:
            differs = True
            for (hidden, gradient), expected in zip(
                self._results(model, share=self._share), self._expected, strict=True
            ):
                own = expected[1].chunk(size, dim=TOKENS)[rank]
                pairs = ((hidden / self._share, expected[0]), (gradient, own))
                differs &= not all(is_close(*pair, model.dtype, self._tolerance) for pair in pairs)
            reason = "it computes other hidden states or gradients" if differs else None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the code of a model raises anything
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        wrong = torch.tensor([reason is not None], dtype=torch.uint8, device=model.device)
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=self._mesh.group("tp"))
        if wrong.item():
            raise ConfigError(
                f"policy.parallel.tp = {size} is not available for {type(model).__name__}: divided by the plan of "
                f"transformers {reason or 'another rank finds a difference'}; set it to 1, and use dp_shard"
            )

    def _results(self, model: Any, share: float) -> Iterator[tuple[Tensor, Tensor]]:
        missing = -PROBE.num_tokens % self._mesh.size("tp")
        forest = Forest((*PROBE.lengths, missing), (*PROBE.parents, -1)) if missing else PROBE
        positions = torch.from_numpy(forest.positions)[None].to(model.device)
        for tokens in probe_tokens(model):
            yield hidden_and_gradient(
                model,
                lambda found: found * share,
                input_ids=torch.nn.functional.pad(tokens, (0, missing))[None],
                position_ids=positions,
                **structured(model, forest, self._plan.backend),
            )
