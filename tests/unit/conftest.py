"""Imports of the fork server, from which tests start child processes.

A child that imports torch and transformers itself takes seconds for that; a forked one starts at once.
"""

from __future__ import annotations

import multiprocessing

PRELOADED = (
    "starling.cli.run.preload",  # torch, transformers, and what a run forks
    "hypothesis",
    "pytest",
    "starling.policy.shell.saving",
    "starling.rollout.api.server",
    "starling.weightsync.layouts.checkpoint",
    "starling.weightsync.tensors.modules",
    "starling.weightsync.tensors.quantiser",
    "starling.weightsync.transports.collective",
    "starling.weightsync.transports.registry",
    "torch.distributed.tensor",
)

multiprocessing.set_forkserver_preload(list(PRELOADED))
