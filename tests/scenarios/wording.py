"""Lines of a scenario: commands and records as text, without redundant ones."""

from __future__ import annotations

import msgspec
from transcript import Aliases

from starling.common.wire import messages as wire
from starling.controller.core import records
from starling.controller.core.events import Command, Fetch, FinishRun, Note, Prune, Send, Store, Write


def command_line(command: Command, aliases: Aliases, sampling: wire.Sampling) -> str | None:
    """Return a command as one line, or None when another line shows the same.

    Groups are shown with the sampling fields that differ from `sampling`, the plan's.
    """
    match command:
        case Send(peer=peer, message=message):
            return f"{peer} <- {_message_text(message, aliases, sampling)}"
        case Write(record=record):
            return f"journal <- {record_text(record)}"
        case Prune(step=step):
            return f"journal: prune {step}"
        case Fetch(step=step):
            return f"journal: fetch {step}"
        case Store(step=step, groups=groups):
            group_names = [f"t{group.ordinal}" + (f" ({group.problem})" if group.problem else "") for group in groups]
            return f"files <- {step}: {' '.join(group_names)}"
        case FinishRun(ok=ok, reason=reason):
            return f"{'done' if ok else 'failed'}: {reason}"
        case Note(kind="left", fields=fields):
            return f"(left {fields['replica']}: {fields['reason']})"
        case Note(kind="tail" | "step_dispatched_again" | "evaluation_moved" as kind, fields=fields):
            return f"({kind} {', '.join(f'{name} {value}' for name, value in fields.items() if value)})"
        case _:
            return None


def record_text(record: records.Record) -> str:
    """Return a record as one line, without its payload."""
    tag = str(record.__struct_config__.tag)
    match record:
        case records.MemberJoined(name=name) | records.MemberLeft(name=name):
            rest = name
        case records.SourceEvicted(name=name, reader=reader):
            rest = f"{name} {reader}"
        case records.ReplicaCounted(name=name, num=num):
            rest = f"{name} {num}"
        case records.GroupsOpened(first=first, num=num):
            rest = " ".join(f"t{ordinal}" for ordinal in range(first, first + num))
        case records.CompletionsStored(key=key):
            rest = key
        case records.PartialCompletionsStored(key=key, partial=partial):
            rest = f"{key} {'+'.join(str(completion.num_tokens) for completion in partial)} tokens"
        case records.TeacherLogprobsStored(key=key, tensors=tensors):
            rest = f"{key} {' '.join(tensor.name for tensor in tensors)}"
        case records.RewardsStored(key=key, rewards=rewards):
            rest = f"{key} {_numbers(rewards)}"
        case records.GroupRequeued(key=key, tries=tries):
            rest = f"{key}, try {tries}"
        case records.GroupDiscarded(key=key, reason=reason):
            rest = f"{key}: {reason}"
        case records.StepFrozen(step=step, ordinals=ordinals):
            rest = f"{step}: {' '.join(f't{ordinal}' for ordinal in ordinals)}"
        case records.StepReopened(step=step, reason=reason):
            rest = f"{step}: {reason}"
        case records.StepCommitted(step=step):
            rest = str(step)
        case records.VersionPublished(version=version):
            rest = f"v{version}"
        case records.CheckpointLoaded(digest=digest, name=name):
            rest = f"{name} {digest.lstrip('0')}"
        case records.VersionAdopted(name=name, version=version):
            rest = f"{name} v{version}"
        case records.EvaluationOpened(number=number, version=version, cause=cause):
            rest = f"{number} of v{version} ({cause})"
        case records.EvaluationClosed(number=number, summary=summary):
            rest = f"{number}: reward {summary['reward_mean']}, {summary['num_failed']} failed"
        case records.EvaluationRequested(request=request):
            rest = request
        case records.CheckpointRequested(version=version):
            rest = f"v{version}"
        case records.StopAsked(reason=reason) | records.RunStopped(reason=reason):
            rest = reason
        case records.SettingChanged(key=key, value=value, step=step):
            rest = f"{key} = {value:g} from step {step}"
        case records.CheckpointWritten(step=step, state=state):
            rest = f"{'state' if state else 'export'} v{step}"
        case records.RunEnded(reason=reason):
            rest = reason
        case records.ControllerStarted(incarnation=incarnation):
            rest = str(incarnation)
        case records.RunBegun(run=run):
            rest = run
    return f"{tag} {rest}"


def _numbers(values: tuple[float | None, ...]) -> str:
    return " ".join("none" if value is None else f"{value:g}" for value in values)


def _message_text(message: wire.Down, aliases: Aliases, sampling: wire.Sampling) -> str:
    lease = aliases.short(getattr(message, "lease", ""))
    match message:
        case wire.GenerateGroup(purpose="train"):
            drawn = msgspec.structs.replace(message.sampling, seed=sampling.seed)
            changed = f"{_changed(sampling, drawn)}{_resume_text(message)}"
            return f"{lease} {message.prompt.id} >= v{message.min_version}{changed}"
        case wire.GenerateGroup():
            resumed = _resume_text(message)
            return f"{lease} {message.prompt.id} = v{message.min_version} x{message.num_completions}{resumed}"
        case wire.TrainStep():
            return f"{lease} {_step(message)}"
        case wire.AdoptWeights(source=source, peer=peer):
            return f"{lease} from {source}{' with its state' if peer else ''}"
        case wire.ReleaseLeases(leases=leases):
            return f"release {' '.join(map(aliases.short, leases))}"
        case wire.Refused(reason=reason) | wire.Drain(reason=reason):
            return f"{message.__struct_config__.tag}: {reason}"
        case wire.OperatorReply(ok=ok, text=text):
            first, *others = text.split("\n")
            return "\n".join([f"{'yes' if ok else 'no'}: {first}", *(f"  | {other}" for other in others)])
        case wire.Welcome() | wire.RequestHello():
            return str(message.__struct_config__.tag)
        case _:
            return lease


def _resume_text(message: wire.GenerateGroup) -> str:
    lengths = "+".join(str(completion.num_tokens) for completion in message.partial)
    return f", goes on from {lengths} tokens" if lengths else ""


def _changed(old: msgspec.Struct, new: msgspec.Struct) -> str:
    before, after = msgspec.to_builtins(old), msgspec.to_builtins(new)
    return "".join(f", {name} {value:g}" for name, value in after.items() if value != before[name])


def _step(message: wire.TrainStep) -> str:
    subjects = [group.prompt_id for group in message.groups] + [prompt.id for prompt in message.examples]
    parts = [" ".join(subjects)]
    if message.num_replicas > 1:
        parts.append(f"policy {message.replica + 1} of {message.num_replicas} in {message.group}")
    if message.published >= 0:
        parts.append(f"after the snapshot of v{message.published}")
    if message.replayed:
        parts.append("again")
    parts += [f"{key} = {value:g}" for key, value in message.settings.items()]
    return ", ".join(parts)
