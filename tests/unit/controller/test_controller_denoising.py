"""Runs of diffusion models: which policies may join, and which settings may change."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from transcript import Script

from starling.common.wire import messages as wire

FORM = wire.DenoisingForm(
    first_step=0, num_steps=3, num_states=4, dtype="float32", latents=(4, 2, 8, 8), text_length=5, text_width=12
)
LIMITS = wire.ModelLimits(vocabulary_size=4, longest=5, denoising=FORM)


def test_the_settings_of_tokens_are_not_changed_in_a_run_of_trajectories() -> None:
    script = Script()
    script.start_run(limits=LIMITS)
    script.receive("operator-0", wire.ChangeSetting(request="r", key="sampling.temperature", value=0.5))
    (reply,) = [send.message for send in script.sent if isinstance(send.message, wire.OperatorReply)]
    assert not reply.ok
    assert "sampling.temperature is for language models" in reply.text


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_steps": 0}, "no model has the limits"),
        ({"num_steps": 1 << 40, "num_states": 1 + (1 << 40)}, "no model has the limits"),
        ({"first_step": 2}, "no model has the limits"),
        ({"num_states": 2}, "no model has the limits"),
        ({"latents": (4, 8)}, "no model has the limits"),
        ({"latents": (4, 2, 8, -8)}, "no model has the limits"),
        ({"latents": (16, 64, 512, 512)}, "set diffusion.stored = 'float16'"),
        ({}, ""),
    ],
)
def test_a_policy_whose_trajectories_cannot_be_is_refused(changes: Any, complaint: str) -> None:
    script = Script()
    lines = script.joins("policy-0", limits=replace(LIMITS, denoising=replace(FORM, **changes)))
    assert any(complaint in line for line in lines), lines
    assert any("refused" in line.lower() for line in lines) == bool(complaint), lines
