"""What policies, rollouts and teachers import at their start, imported once: they are forked from the process that did.

Only imports may happen here. A fork keeps one thread, and no GPU: neither may be in use before it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os

from starling.common.observe.process import die_with_parent

_MODULES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_utils",
    "starling.policy.settings.policy",
    "starling.policy.train.learner",
    "starling.policy.train.model.load",
    "starling.policy.train.rl",
    "starling.policy.train.sft",
    "starling.rollout.settings",
    "starling.rollout.shell.results",
    "starling.rollout.engine.embedded.engine",
    "starling.rollout.engine.teacher",
    "starling.weightsync.publisher.publisher",
    "starling.weightsync.puller.puller",
)

# A server looks whether its parent lives after the imports only, and so would outlive one that is stopped during them.
die_with_parent()
if os.environ.pop("STARLING_SUPERVISOR", None) not in (None, str(os.getppid())):  # it has gone already
    os._exit(0)

# What libraries say while they are imported is not the supervisor's to show. What goes wrong afterwards is.
_nowhere, _errors = os.open(os.devnull, os.O_WRONLY), os.dup(2)
os.dup2(_nowhere, 2)

gc.disable()
for _module in _MODULES:
    # A service that is not installed, or does not start here, says so itself when its turn comes.
    with contextlib.suppress(Exception):
        importlib.import_module(_module)
os.dup2(_errors, 2)
os.close(_errors)
os.close(_nowhere)
# What is here stays, in every child too: the collector need not look through it, which would also copy its pages.
gc.freeze()
gc.enable()
# Taking torch apart takes a second, in which a process would be left behind. The children never come here.
atexit.register(os._exit, 0)
