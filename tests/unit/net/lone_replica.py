"""A replica process for tests: `python lone_replica.py ADDRESS KEY_FILE NAME RUN [HANGING_S]` says hello.

Its working thread then waits to be killed, or, with HANGING_S, hangs; that is the link's time limit for it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from starling.common.net import link as link_module
from starling.common.net.curve import load_key
from starling.common.net.link import ControllerLink
from starling.common.net.settings import LinkSettings
from starling.common.wire.messages import Hello


def main(address: str, key: str, name: str, run: str, hanging_s: str = "") -> None:
    """Run the link until it closes."""
    if hanging_s:
        link_module.HANGING_S = float(hanging_s)
    link = ControllerLink(
        LinkSettings(name=name, run=run, controller=address, key=load_key(Path(key))),
        Hello(role="reward", host="h", pid=1, num_slots=1),
    )
    link.start()
    if hanging_s:
        time.sleep(60.0)
    link.receive(60.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
