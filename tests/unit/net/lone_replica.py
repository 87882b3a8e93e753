"""A replica process for tests: `python lone_replica.py ADDRESS KEY_FILE NAME RUN` says hello and waits to be killed."""

from __future__ import annotations

import sys
from pathlib import Path

from starling.common.net.curve import load_key
from starling.common.net.link import ControllerLink
from starling.common.net.settings import LinkSettings
from starling.common.wire.messages import Hello


def main(address: str, key: str, name: str, run: str) -> None:
    """Run the link until it closes."""
    link = ControllerLink(
        LinkSettings(name=name, run=run, controller=address, key=load_key(Path(key))),
        Hello(role="reward", host="h", pid=1, num_slots=1),
    )
    link.start()
    link.receive(60.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
