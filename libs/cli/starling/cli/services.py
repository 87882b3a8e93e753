"""The services by name, each with the module that runs it. None of them need be installed to say so."""

from __future__ import annotations

from typing import Final

SERVICES: Final = {
    **{role: f"starling.{role}.shell.main" for role in ("controller", "policy", "rollout", "reward")},
    "teacher": "starling.rollout.shell.teacher",  # it shares the rollout's distribution, and what it needs
}
