"""The commands of `starling` in their groups. Each is imported when it is called, so that help stays fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

from cyclopts import App, Group, Parameter

from starling.cli.services import SERVICES, is_installed, missing, run_module
from starling.common.errors import ConfigError

SUMMARY: Final = "Reinforcement learning for large models: rollouts, rewards, training and weight synchronisation."
NOTES: Final = """`starling COMMAND --help` describes one command, `starling settings WORD ...` searches all settings.

Examples:
  starling smoke
  starling run recipes/quickstart.toml --rl.num-steps 50
  starling why runs/quickstart"""
GROUPS: Final[dict[str, tuple[tuple[str, str, str], ...]]] = {
    "Run": (
        ("run", "cli.run.command:command", "Train: start and supervise every process of a run on this machine."),
        ("prepare", "cli.prepare.command:command", "Write keys and configuration of a run, and start nothing."),
        ("smoke", "cli.run.command:smoke_command", "Check in under a minute that everything works on this machine."),
        ("settings", "cli.settings.command:command", "Search all settings, or write them as a recipe."),
        ("migrate", "cli.migrate.command:command", "Translate a settings file of NVIDIA Cosmos-RL into a recipe."),
        ("scratch", "cli.model.command:scratch_command", "Create the model folder of a recipe with [model.scratch]."),
        ("export", "cli.model.command:export_command", "Write the model of a saved state in Hugging Face format."),
    ),
    "Evaluate": (
        ("evaluate", "cli.evaluate.command:evaluate_command", "Evaluate a model, or the newest version of a run."),
        ("infer", "cli.evaluate.command:infer_command", "Answer the prompts of a file with a model."),
        ("serve", "cli.evaluate.command:serve_command", "Answer requests of OpenAI clients with a model."),
    ),
    "Operate": (
        ("status", "cli.operate.command:status_command", "Show what a run is doing: its phase, replicas and groups."),
        ("top", "cli.top.command:command", "Show a run live in this terminal, and operate it by keys."),
        ("why", "cli.operate.command:why_command", "Explain what a run is waiting for, since when, and the deadline."),
        ("set", "cli.operate.command:set_command", "Change a setting of a run, from its next step on."),
        ("checkpoint", "cli.operate.command:checkpoint_command", "Save a state of a run before its next step."),
        ("scale", "cli.operate.scaling:scale_command", "Set how many replicas of a role a run has."),
        ("drain", "cli.operate.scaling:drain_command", "Take one replica out of a run; others get its work."),
        ("stop", "cli.operate.command:stop_command", "Stop a run gracefully: finish the step, write a checkpoint."),
        ("profile", "cli.profile.command:command", "Profile processes of a run, and merge what they recorded."),
        ("keys", "cli.operate.keys:command", "Create, list or revoke the CURVE keys of a run."),
        (
            "join",
            "cli.join.command:command",
            "Join a run in progress as one more replica, by a key alone.",
        ),
        (
            "deploy",
            "cli.deploy.command:command",
            "Install units of systemd, or write the job of a cluster: Slurm, Lepton.",
        ),
    ),
    "Inspect": (
        ("runs", "cli.runs.command:runs_command", "List runs: state, version, reward, evaluation, duration, recipe."),
        ("compare", "cli.runs.command:compare_command", "Compare runs: settings that differ, figures, and curves."),
        (
            "dashboard",
            "cli.dashboard.command:command",
            "Serve a web page on runs: topology, curves, completions, waits and events, live.",
        ),
        ("report", "cli.runs.command:report_command", "Write the report of a run as one HTML file."),
        (
            "plan",
            "cli.plan.command:command",
            "Estimate a weight synchronisation, or meshes for training, without a GPU.",
        ),
        (
            "sync-report",
            "cli.report.command:sync_report_command",
            "Show where the time of weight synchronisation went.",
        ),
        ("record", "cli.report.command:record_command", "Collect a controller's recording into a crash report."),
        ("replay", "cli.report.command:replay_command", "Rebuild a controller's state from its recording."),
        ("sim", "sim.cli:command", "Simulate runs under faults, or estimate the effect of a change."),
    ),
    "Services": (
        ("controller", "", "Run the controller by itself."),
        ("policy", "", "Run a policy by itself; with --replay FOLDER RECIPE: train on trajectories."),
        ("rollout", "", "Run a rollout by itself; with --only RECIPE: generate without a policy."),
        ("reward", "", "Run a reward service by itself; with bench or replay FILE: measure one, score again."),
        ("teacher", "", "Run a teacher by itself."),
    ),
    "Shell": (("completion", "cli.completion:command", "Print or install the completion of bash, zsh or fish."),),
}
"""Name, import path below `starling` (none for services, which parse their own arguments) and one sentence each."""
HIDDEN: Final = (
    ("rollout-only", "cli.run.command:rollout_only_command"),
    ("policy-replay", "cli.run.command:policy_replay_command"),
)
"""`starling rollout --only` and `starling policy --replay`."""


def make_app() -> App:
    """Return the command `starling`; no command is imported yet."""
    app = App(
        name="starling",
        help=SUMMARY,
        help_epilogue=NOTES,
        help_format="plaintext",
        version_flags=[],
        usage="Usage: starling COMMAND ...",
        default_parameter=Parameter(negative=(), show_default=_shown_default),
    )
    app["--help"].show = False
    for number, (title, commands) in enumerate(GROUPS.items()):
        group = Group(title, sort_key=number)
        for order, (name, target, text) in enumerate(commands):
            if target and is_installed(target.partition(".")[0]):
                app.command(f"starling.{target}", name=name, help=text, group=group, sort_key=order)
            else:
                app.command(_service(name), name=name, help=text, group=group, sort_key=order, help_flags=[])
    for name, target in HIDDEN:
        app.command(f"starling.{target}", name=name, show=False)
    return app


def _shown_default(value: object) -> str | None:
    absent = isinstance(value, bool) or value is None or value in ("", (), "{}")
    return None if absent else str(value)


def _service(name: str) -> Callable[..., int]:
    """Return the command of a service, for help and completion: `starling.cli.main` runs it without this module.

    A command of a distribution that is not installed only says so.
    """

    def run(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
        if name not in SERVICES:
            raise ConfigError(missing(name, name))
        return run_module(name, arguments)

    return run
