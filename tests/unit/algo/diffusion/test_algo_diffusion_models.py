"""Velocities of diffusion transformers: those of diffusers' own pipelines, and conditions that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_diffusion import CHANNELS, FAMILIES, TEXT_WIDTH, conditions, latents, tiny
from torch import Tensor

from starling.algo.diffusion.conditions import Conditions
from starling.algo.diffusion.models import FAMILIES as KNOWN
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.transitions import Steps, step_levels, transition

NUM_STEPS = 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_each_family_has_a_tiny_model() -> None:
    assert {type(tiny(name)).__name__ for name in FAMILIES} == set(KNOWN)


@torch.no_grad()
def followed(model: Any, state: Tensor, sigmas: list[float], given: Conditions) -> Tensor:
    """Follow the probability flow by our own steps."""
    levels = step_levels(sigmas, 0.0)
    for sigma, following, level in zip(sigmas[:-1], sigmas[1:], levels, strict=True):
        sigma_b, following_b, level_b = (torch.full((len(state),), one) for one in (sigma, following, level))
        steps = Steps(sigma_b, following_b, 0.0, level_b)
        state = transition("ode", state, velocity(model, state, sigma_b, given), steps).mean
    return state


def scheduler_of(shift: float) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=shift)


def sigmas_of(scheduler: Any) -> list[float]:
    scheduler.set_timesteps(NUM_STEPS)
    return [float(sigma) for sigma in scheduler.sigmas]


def test_wan_follows_the_flow_as_its_pipeline() -> None:
    from diffusers import WanPipeline

    model, scheduler, start, given = tiny("wan"), scheduler_of(3.0), latents("wan"), conditions("wan")
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=model)
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        prompt_embeds=given.text,
        guidance_scale=1.0,
        height=64,
        width=64,
        num_frames=9,
        latents=start,
        num_inference_steps=NUM_STEPS,
        output_type="latent",
    ).frames
    torch.testing.assert_close(followed(model, start, sigmas_of(scheduler), given), theirs, atol=2e-5, rtol=1e-4)


class UncheckedLatents:
    """In place of a safety checker, which would look at decoded videos: these tests compare latents."""

    def to(self, device: torch.device) -> None:
        """Stay here."""


def cosmos_pipeline(model: Any, scheduler: Any) -> Any:
    from diffusers import AutoencoderKLWan, Cosmos2_5_PredictBasePipeline

    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 0.5, 2.0, 1.5],
    ).eval()
    pipeline = Cosmos2_5_PredictBasePipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=model,
        vae=vae,
        scheduler=scheduler,
        safety_checker=UncheckedLatents(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("num_given", [0, 1, 2])
def test_cosmos_follows_the_flow_as_its_pipeline(num_given: int) -> None:
    """With a video of one or five frames, the first one or two frames of latents are given."""
    model, scheduler, start = tiny("cosmos"), scheduler_of(1.0), latents("cosmos", batch=1)
    pipeline, given = cosmos_pipeline(model, scheduler), conditions("cosmos", batch=1)
    size = {"height": 64, "width": 64, "num_frames": 9}
    video = torch.rand(1, 3, 4 * num_given - 3, 64, 64) * 2.0 - 1.0 if num_given else None
    theirs = pipeline(
        **size,
        video=video,
        num_latent_conditional_frames=num_given or 2,
        prompt_embeds=given.text,
        guidance_scale=1.0,
        latents=start,
        num_inference_steps=NUM_STEPS,
        output_type="latent",
    ).frames
    frames = theirs[:, :, :num_given] if num_given else None
    ours = followed(model, start[:, :, num_given:], sigmas_of(scheduler), replace(given, frames=frames))
    torch.testing.assert_close(ours, theirs[:, :, num_given:], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["sd3", "sana", "sana_video"])
def test_other_families_call_their_model_as_its_pipeline(name: str) -> None:
    model, state, given = tiny(name), latents(name), conditions(name)
    sigma = torch.tensor([0.9, 0.25])
    further = {"pooled_projections": given.pooled} if name == "sd3" else {"encoder_attention_mask": given.text_mask}
    scale = 500.0 if name == "sana" else 1000.0
    with torch.no_grad():
        theirs = model(
            hidden_states=state, timestep=scale * sigma, encoder_hidden_states=given.text, return_dict=False, **further
        )[0]
        torch.testing.assert_close(velocity(model, state, sigma, given), theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_trajectory_is_computed_as_in_a_batch(name: str) -> None:
    model, state, given = tiny(name), latents(name), conditions(name)
    sigma = torch.tensor([0.9, 0.25])
    with torch.no_grad():
        together = velocity(model, state, sigma, given)
        for index in range(2):
            one = slice(index, index + 1)
            alone = velocity(
                model,
                state[one],
                sigma[one],
                Conditions(given.text[one], given.text_mask[one], None if given.pooled is None else given.pooled[one]),
            )
            torch.testing.assert_close(alone, together[one], atol=1e-5, rtol=1e-4)


def test_conditions_that_do_not_fit_are_refused() -> None:
    wan, sd3, cosmos = tiny("wan"), tiny("sd3"), tiny("cosmos")
    sigma, given = torch.tensor([0.5, 0.5]), conditions("wan")
    with pytest.raises(ValueError, match=r"WanTransformer3DModel takes no given frames"):
        velocity(wan, latents("wan"), sigma, replace(given, frames=latents("wan")))
    with pytest.raises(ValueError, match=rf"\[2, 5, 3\], and the model reads \[2, tokens, {TEXT_WIDTH}\]"):
        velocity(wan, latents("wan"), sigma, Conditions(torch.zeros(2, 5, 3)))
    with pytest.raises(ValueError, match="pooled"):
        velocity(sd3, latents("sd3"), sigma, Conditions(given.text))
    with pytest.raises(ValueError, match="the model reads 5 channels, and the latents have 5"):
        velocity(cosmos, torch.zeros(2, 5, 3, 8, 8), sigma, given)
    with pytest.raises(ValueError, match="Linear is no family"):
        velocity(torch.nn.Linear(2, 2), latents("wan"), sigma, given)


def test_a_model_of_ones_own_has_the_method() -> None:
    class Straight(torch.nn.Module):
        dtype = torch.float64

        def velocity(self, state: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
            assert state.dtype == torch.float64
            return state * 2.0

    state = latents("wan")
    found = velocity(Straight(), state, torch.tensor([0.5, 0.5]), conditions("wan"))
    torch.testing.assert_close(found, 2.0 * state)
