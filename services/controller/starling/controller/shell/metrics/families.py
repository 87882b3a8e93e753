"""All metrics of a run: names, units and labels. `docs/reference/prometheus.md` has their table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starling.common.observe.metrics import Family

STEP_GAUGES: Final[Mapping[str, Family]] = {
    key: Family(f"starling_step_{name}", "gauge", text)
    for key, name, text in (
        ("loss", "loss", "Loss of the last step."),
        ("entropy", "entropy_nats", "Mean entropy of a token."),
        ("clip_fraction", "clip_ratio", "Share of tokens that are clipped."),
        ("approx_kl", "approx_kl_nats", "Divergence (k3) of the new policy from the old one."),
        ("grad_norm", "grad_norm", "Norm of the gradient before clipping."),
        ("learning_rate", "learning_rate", "Learning rate of the last step."),
        ("reward_mean", "reward_mean", "Mean reward of the trained completions."),
        ("reward_std", "reward_std", "Standard deviation of their rewards."),
        (
            "sampled_reward_mean",
            "sampled_reward_mean",
            "Mean reward with the groups that dynamic sampling filtered out.",
        ),
        ("zero_advantage_share", "zero_advantage_ratio", "Share of completions whose advantage is 0."),
        ("mismatch_kl", "mismatch_kl_nats", "Divergence (k3) of rollout and trainer for equal weights."),
        ("staleness_mean", "staleness_mean_versions", "Mean age of the trained completions."),
        ("staleness_max", "staleness_max_versions", "Age of the oldest of them."),
        ("ess_token", "ess_token_ratio", "Effective sample size of the tokens over their number."),
        ("completion_tokens_mean", "completion_tokens_mean", "Mean number of sampled tokens of a completion."),
        ("truncated_share", "truncated_ratio", "Share of completions that reached the limit of tokens."),
        ("filtered_share", "filtered_ratio", "Share of groups that dynamic sampling filtered out."),
        ("tokens_per_s", "tokens_per_second", "Sampled tokens of the last step over the time of its training."),
        ("mfu", "mfu_ratio", "Model FLOP utilisation of the policy."),
        ("padding_waste", "padding_ratio", "Share of token slots with padding."),
    )
}
"""By the name of the metric in a line `step`; `docs/reference/metrics.md` defines each."""

STEP_PREFIXES: Final[Mapping[str, Family]] = {
    "score/": Family("starling_step_score", "gauge", "Mean score of one scorer.", ("scorer",)),
    "eval_score/": Family("starling_step_eval_score", "gauge", "Mean score of one evaluation scorer.", ("scorer",)),
    "env/": Family("starling_step_env", "gauge", "Mean of a number that an environment reports.", ("name",)),
    "staleness/": Family("starling_step_staleness_ratio", "gauge", "Share of trained tokens of one age.", ("age",)),
}
"""By the prefix of the metric; the rest of its name is the label."""

PHASES: Final = ("wait_data", "forward", "backward", "optimizer", "publish_exposed", "checkpoint", "other")
"""Parts of a step's time; they sum to the whole."""

REPLICA: Final = ("replica", "role")
GAUGES: Final[Mapping[str, Family]] = {
    key: Family(f"starling_replica_{name}", "gauge", text, REPLICA)
    for key, name, text in (
        ("tokens_per_s", "tokens_per_second", "Throughput as last measured; an idle engine keeps it."),
        ("rows", "rows", "Completions that a rollout generates."),
        ("queue_depth", "queue_depth", "Work that waits in a reward service or a teacher."),
        ("workers_ready", "workers_ready", "Workers of a reward service that are ready."),
        ("scorers_quarantined", "scorers_quarantined", "Scorers of which no worker can be started."),
    )
}
"""By the name of the gauge in heartbeats."""

OUTCOMES: Final = ("complete", "stopped", "failed")
LEFT_REASONS: Final[Mapping[str, str]] = {
    "it left: ": "left",
    "it was started again": "restarted",
    "its connection closed": "disconnected",
    "it was silent for ": "silent",
    "it was not heard after ": "silent",
    "it did not leave within ": "silent",
}
"""By the beginning of the text of a line `left`; anything else is `evicted`."""
LAG_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SPREAD_BOUNDS_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

FAMILIES: Final = (
    Family("starling_run_phase", "gauge", "1 for the phase of the run.", ("phase",)),
    Family(
        "starling_run_outcome",
        "gauge",
        "1 for how the run ends (`complete`, `stopped`, `failed`), from when it is known; else 0.",
        ("outcome",),
    ),
    Family("starling_run_incarnation", "gauge", "How often the controller of this attempt has been started."),
    Family("starling_run_version", "gauge", "Steps that are trained; without a policy, files that are written."),
    Family("starling_run_last_step", "gauge", "Steps of the whole run."),
    Family("starling_run_groups", "gauge", "Groups in each state.", ("state",)),
    Family("starling_run_staleness_bound_versions", "gauge", "`rl.max_staleness` in force."),
    Family("starling_run_refused_messages_total", "counter", "Messages that the controller refused to read."),
    Family("starling_run_alarm", "gauge", "1 for each alarm of the policy that is on.", ("alarm",)),
    Family("starling_run_events_total", "counter", "Lines of metrics.jsonl, by kind.", ("kind",)),
    Family("starling_run_journal_bytes", "gauge", "Size of the journal and of its log (WAL)."),
    Family("starling_journal_lag_seconds", "histogram", "Time until a record is durable, of the oldest of a commit."),
    Family("starling_journal_waiting_seconds", "gauge", "Time that the oldest record waits now; 0 if none does."),
    Family("starling_groups_trained_total", "counter", "Groups that were trained, or written to a file."),
    Family(
        "starling_groups_failed_total",
        "counter",
        "Groups that are generated again (`waiting`) or given up (`discarded`), by the status of the completion.",
        ("outcome", "status"),
    ),
    Family("starling_replica_version", "gauge", "Weight version that a replica holds.", REPLICA),
    Family("starling_replica_leases", "gauge", "Pieces of work that a replica has in hand.", REPLICA),
    Family("starling_replica_pulling_version", "gauge", "Weight version that a replica pulls, if any.", REPLICA),
    Family("starling_replica_silent_seconds", "gauge", "Time since the last message of a replica.", REPLICA),
    Family("starling_replicas_joined_total", "counter", "Replicas that have joined, also again.", ("role",)),
    Family(
        "starling_replicas_left_total",
        "counter",
        "Replicas that have gone: `left`, `restarted`, `disconnected`, `silent`, or `evicted`.",
        ("role", "reason"),
    ),
    *GAUGES.values(),
    Family("starling_steps_total", "counter", "Steps that were committed."),
    Family("starling_steps_skipped_total", "counter", "Steps that left the weights unchanged (`skipped_step`)."),
    Family("starling_step_seconds_total", "counter", "Time of all steps."),
    Family("starling_step_time_seconds_total", "counter", "The same by what the policy did.", ("phase",)),
    Family("starling_step_tokens_total", "counter", "Sampled tokens of all steps."),
    *STEP_GAUGES.values(),
    *STEP_PREFIXES.values(),
    Family("starling_evaluations_total", "counter", "Evaluations that have ended."),
    Family("starling_evaluation_version", "gauge", "Version of the last evaluation."),
    Family("starling_evaluation_reward_mean", "gauge", "Mean reward of the last evaluation."),
    Family("starling_evaluation_failed_prompts", "gauge", "Prompts of the last evaluation without an answer."),
    Family("starling_weights_version", "gauge", "Newest weight version that is offered."),
    Family("starling_weights_publish_seconds", "summary", "Time of a publication in the policy."),
    Family("starling_weights_pull_seconds", "summary", "Time in which a replica pulled a version.", ("replica",)),
    Family("starling_weights_pause_seconds", "summary", "Time in which it generated nothing for it.", ("replica",)),
    Family("starling_weights_pulled_bytes_total", "counter", "Bytes of the versions that it pulled.", ("replica",)),
    Family("starling_weights_unproven_total", "counter", "Adoptions without proof of the published weights."),
    Family(
        "starling_weights_spread_seconds",
        "histogram",
        "Time from the publication of a version until all rollouts hold it, or a newer one.",
    ),
)
"""In the order of their exposition."""

COUNTED: Final = tuple(
    family.name
    for family in FAMILIES
    if family.kind == "counter" and not family.labels and "refused" not in family.name
)
"""Counters of notes that have no labels."""
