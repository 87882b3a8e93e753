"""Settings of policies that make steps together: each time limit is less than that of those that wait for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from starling.common.settings import NetworkSettings
from starling.policy.settings.policy import PolicySettings, check_elastic


def check(*, elastic: bool = True, publish_timeout_s: float = 30.0, **parallel: Any) -> None:
    """Check settings of a policy with these time limits."""
    tree = {"publish_timeout_s": publish_timeout_s, "parallel": {"elastic": elastic, **parallel}}
    check_elastic(PolicySettings.model_validate(tree), NetworkSettings())


def test_default_time_limits_fit_each_other() -> None:
    check()


@pytest.mark.parametrize("publish_timeout_s", [31.0, 90.0])
def test_publication_that_outlasts_the_wait_of_other_policies_is_refused(publish_timeout_s: float) -> None:
    """A rollout that releases no snapshot could have the policy evicted that waits for it."""
    text = (
        f"policy.publish_timeout_s = {publish_timeout_s:g} must be at most a half of policy.parallel.replica_timeout_s "
        "= 60: other policies wait for the one that waits for readers of a snapshot"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        check(publish_timeout_s=publish_timeout_s)


def test_publication_of_a_policy_that_trains_alone_may_wait_for_longer() -> None:
    check(elastic=False, publish_timeout_s=90.0)


def test_wait_for_other_policies_that_outlasts_that_of_the_ranks_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"replica_timeout_s = 600 must be less than policy\.parallel\.timeout_s = 600"
    ):
        check(replica_timeout_s=600.0)
