"""Joining of replicas: a hello is admitted or refused, also for the checkpoint of a run without a policy."""

from __future__ import annotations

import math
import re
from typing import Final

from starling.common.errors import WeightsError
from starling.common.wire import messages as wire
from starling.common.wire.tensors import SAMPLE_DIMS, STORED_BYTES
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Received
from starling.controller.core.groups.validation.recording import replay_problem
from starling.controller.core.groups.validation.validation import MAX_TENSOR_BYTES
from starling.controller.core.records import CheckpointLoaded, MemberJoined
from starling.controller.core.replicas.departure import depart, evict, refuse
from starling.controller.core.replicas.membership import LAYOUT_BYTES_PER_HELLO, LAYOUT_PARTS_PER_HELLO, Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training.results import on_policy_version, version_problem
from starling.controller.core.weights.versions import set_held_version
from starling.weightsync.plan.layout import Layout, TensorSpec, decode_layout

MAX_LAYOUT_BYTES: Final = 64 << 20
"""A model of 45,000 tensors, each split over 16 ranks, has a layout of about 50 MiB."""
OF_MORE_REPLICAS: Final = Dirty.EVALUATE | Dirty.PIN | Dirty.DISPATCH | Dirty.SCORE
"""What can be due once there is one more rollout, reward or teacher: it may be the last that the run waits for."""
_DIGEST: Final = re.compile("[0-9a-f]{32}")


def on_hello(state: ControllerState, event: Received, message: wire.Hello) -> None:
    """Admit a replica, or refuse it with a reason. One that joins again and again has to wait: it repeats its hello."""
    replicas, name, incarnation = state.replicas, event.sender, event.incarnation
    known = replicas.membership.members.get(name)
    if known is None or known.incarnation != incarnation:
        num = 1 + sum(map(len, event.buffers)) / LAYOUT_BYTES_PER_HELLO
        if not replicas.membership.hellos.take(name, num, event.now):
            return
    refusal, layout = _check(state, event, message, known)
    if refusal is not None:
        refuse(state, name, refusal)
        return
    if known is not None and known.incarnation == incarnation:
        # Its welcome was lost. A hello is no heartbeat: one that sends nothing else would stay a member for ever.
        replicas.sharing.reset(known)
        replicas.slots.mark(known)
        state.dirty = Dirty.ALL
        welcome(state, known)
        return
    if known is not None:
        depart(state, known, "it was started again", ended=True)
    member = replicas.membership.join(name, incarnation, message, layout, event.now)
    replicas.sharing.reset(member)
    if replicas.membership.is_set_aside(name, event.now):
        if replicas.membership.works_without(name, event.now):
            replicas.slots.cool_down(member, replicas.membership.set_aside[name])
        else:
            del replicas.membership.set_aside[name]
    limits = message.limits if member.role == "policy" else None
    state.outbox.write(MemberJoined(name=name, role=member.role, epoch=incarnation, limits=limits))
    state.outbox.note("joined", replica=name, role=member.role, host=message.host, pid=message.pid)
    welcome(state, member)
    if not state.weights.is_reading_checkpoint and _brings_checkpoint(state, member):
        _set_checkpoint(state, message.checkpoint, name)
    if member.role == "rollout":
        set_held_version(state, member, member.version)
        if state.plan.fans_out:
            state.dirty |= Dirty.PUBLISH
    elif member.role in ("reward", "teacher"):
        replicas.slots.mark(member)
    else:
        state.weights.policy_layout, state.training.limits = layout, limits
        version, member.version = member.version, min(member.version, state.weights_version)
        on_policy_version(state, member, version)
        state.dirty = Dirty.ALL
    state.dirty |= OF_MORE_REPLICAS


def welcome(state: ControllerState, member: Member) -> None:
    """Welcome a replica as a member."""
    state.outbox.send(member.name, state.plan.welcome(member.role))


def _check(
    state: ControllerState, event: Received, message: wire.Hello, known: Member | None
) -> tuple[str | None, Layout | None]:
    """Return why a replica may not join, or None, and the layout of its weights.

    `known`: the member of this name. A layout takes up to seconds to decode, and a hello may be repeated, so that of a
    member is not decoded again, and an incarnation that sent an unusable one is refused from then on.
    """
    membership, name, incarnation = state.replicas.membership, event.sender, event.incarnation
    refusal, layout = membership.refusal(name, incarnation, message), None
    if refusal is None and message.has_layout:
        if known is not None and known.incarnation == incarnation:
            layout = known.layout
        else:
            refusal, layout = _decode(name, event.buffers[0], _model(state, message))
            num_parts = len(layout.tensors) + sum(len(rank.shards) for rank in layout.ranks) if layout else 0
            membership.hellos.charge(name, num_parts / LAYOUT_PARTS_PER_HELLO)
        if refusal is not None:
            membership.ban(name, incarnation, refusal)
    if refusal is None and message.role == "policy":
        refusal = version_problem(state, message.version) or _limits_problem(state, message.limits)
        if not (state.plan.kind.trains or state.plan.fans_out):
            refusal = "this run trains nothing, and its rollouts read their weights themselves; start no policy"
    has_no_weights = message.role == "rollout" and message.version < membership.initial_version
    # A rollout that was a member had weights: its engine is being rebuilt.
    if refusal is None and has_no_weights and not membership.was_member(name, incarnation):
        refusal = f"this run has no policy, and {name} holds no weights; set rollout.load_weights = true"
    if refusal is None and message.role == "rollout" and not message.num_slots and state.plan.colocate:
        refusal = (
            f"{name} has no slots and only follows the run, but rollouts of this run use their devices in turn with "
            "the policy (launch.colocate); follow a run without it"
        )
    if refusal is None and message.role in ("policy", "rollout"):
        refusal = _checkpoint_problem(state, name, message.checkpoint)
    return refusal, layout


def on_checkpoint_read(state: ControllerState, digest: str) -> None:
    """Take the digest of the checkpoint that the controller has read; empty: the first replica that brings one decides.

    Replicas that have joined meanwhile are compared with it.
    """
    state.weights.is_reading_checkpoint, state.dirty = False, Dirty.ALL
    _set_checkpoint(state, digest, "controller")
    membership = state.replicas.membership
    for member in [*membership.of("policy"), *membership.adopters()]:
        problem = _checkpoint_problem(state, member.name, member.checkpoint)
        if problem is not None:
            evict(state, member, problem)
        elif _brings_checkpoint(state, member):
            _set_checkpoint(state, member.checkpoint, member.name)


def _brings_checkpoint(state: ControllerState, member: Member) -> bool:
    """Say whether the run's checkpoint may be the one that a replica has loaded.

    Where a policy publishes it, only that one: rollouts pull its weights, and one that lies would keep the policy out.
    """
    return not state.plan.kind.trains and member.role == ("policy" if state.plan.fans_out else "rollout")


def _set_checkpoint(state: ControllerState, digest: str, name: str) -> None:
    """Make `digest`, unless it is empty, that of the run's checkpoint, unless that is known."""
    if digest and not state.weights.checkpoint:
        state.weights.checkpoint = digest
        state.outbox.write(CheckpointLoaded(digest=digest, name=name))


def _checkpoint_problem(state: ControllerState, name: str, digest: str) -> str | None:
    """Return why the checkpoint that a replica of a run without training has loaded is not that of the run, or None.

    What a replica says of its own weights cannot be proven here. This finds folders that differ, not lies.
    """
    if state.plan.kind.trains or not digest:
        return None  # A replica of an older version does not report it.
    if not _DIGEST.fullmatch(digest):
        return f"{name} sent a digest of its checkpoint that is not 32 hexadecimal digits"
    if digest == (state.weights.checkpoint or digest):
        return None
    return (
        f"{name} has loaded another checkpoint than this run began with: its model folder has the digest "
        f"{digest}, and that of the run is {state.weights.checkpoint}; give it a copy of the same folder, "
        "or begin a new run"
    )


def _limits_problem(state: ControllerState, limits: wire.ModelLimits | None) -> str | None:
    """Return why the limits of a policy's model cannot be used, or None."""
    if limits is None:
        return None
    media, numbers = limits.media, [limits.vocabulary_size, limits.longest]
    if media is not None:
        numbers += [media.image_token_id, media.video_token_id, media.num_positions]
        numbers += [media.patch_values - 1, media.merge_size - 1]
    experts, fits = limits.experts, all(0 <= number < 1 << 31 for number in numbers)
    if experts is not None:
        fits = fits and 1 <= experts.num_chosen <= experts.num_experts < 1 << 15 and 1 <= experts.num_layers < 1 << 15
    form, plan = limits.denoising, state.plan
    if form is not None:
        numbers = [form.num_steps, form.text_length, form.text_width, *form.latents]
        fits = fits and all(0 < number < 1 << 31 for number in numbers) and form.pooled_width >= 0
        fits = fits and form.first_step >= 0 and form.first_step + form.num_steps <= limits.vocabulary_size
        fits = fits and form.num_states in (0, form.num_steps + 1) and len(form.latents) in SAMPLE_DIMS
    if not fits:
        return f"no model has the limits {limits}"
    if form is not None and plan.kind.has_rl_steps:
        size_bytes = plan.group_size * max(1, form.num_states) * math.prod(form.latents) * STORED_BYTES[form.dtype]
        if size_bytes > MAX_TENSOR_BYTES:
            return (
                f"the states of the trajectories of a group take {size_bytes} bytes, and the journal stores tensors up "
                f"to {MAX_TENSOR_BYTES}: lower rl.group_size, diffusion.num_noisy_steps or the size of samples, or set "
                "diffusion.stored = 'float16'"
            )
    return (plan.kind.has_rl_steps and replay_problem(plan.sampling, plan.group_size, limits)) or None


def _model(state: ControllerState, message: wire.Hello) -> tuple[TensorSpec, ...] | None:
    """Return the tensors that a replica may have, None if unknown: a rollout has no more weights than the policy."""
    policy = state.weights.policy_layout
    return None if policy is None or message.role == "policy" else policy.tensors


def _decode(name: str, data: bytes, model: tuple[TensorSpec, ...] | None) -> tuple[str | None, Layout | None]:
    """Return why the layout in `data` cannot be used, or None, and the layout; `model`: as of `decode_layout`."""
    if len(data) > MAX_LAYOUT_BYTES:
        return f"the layout of {name} has {len(data)} bytes, and {MAX_LAYOUT_BYTES} are allowed", None
    try:
        return None, decode_layout(data, model)
    except WeightsError as error:
        return str(error), None
