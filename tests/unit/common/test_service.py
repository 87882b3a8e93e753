"""The command line of a service."""

from __future__ import annotations

import pytest

from starling.common.errors import ConfigError
from starling.common.service import parse_arguments
from starling.common.settings import ServiceSettings


@pytest.mark.parametrize("name", ["west", "rollout", "policy-0", "rollout-1.5", "rollout-x"])
def test_a_replica_must_be_called_by_its_role(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--name {name} is no name of a rollout; write rollout-NUMBER"):
        parse_arguments("rollout", ["--controller", "tcp://h:1", "--name", name], ServiceSettings)
    parsed = parse_arguments("rollout", ["--controller", "tcp://h:1", "--name", "rollout-12"], ServiceSettings)
    assert parsed.name == "rollout-12"
