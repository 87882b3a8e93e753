"""Hostile scorers: what a reward service has to survive. `reward_isolation.py` and tests copy the file.

    loop      does not end                        exits     ends its process
    bomb      forks without end                   flood     prints without end
    memory    takes 10 GiB                        writes    adds to the file that the completion names
    children  take memory in many processes       connects  to the port of this machine that the completion names
    segfault  reads an address that is not its own

A limit on the number of tasks is to hold `bomb`: run none of them without a sandbox.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from typing import Any


def loop(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    while True:
        pass


def bomb(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    while True:
        if os.fork() == 0:
            while True:
                pass


def memory(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    return float(len(bytearray(10 << 30)))


def children(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    for _ in range(8):
        if os.fork() == 0:
            taken = bytearray(200 << 20)
            time.sleep(1000)
            return float(len(taken))
    time.sleep(1000)
    return 0.0


def segfault(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    return float(len(ctypes.string_at(0)))


def exits(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    os._exit(7)


def flood(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    while True:
        print("x" * 1000)


def writes(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    with open(completion, "a") as file:
        return float(file.write("was here"))


def connects(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    with socket.create_connection(("127.0.0.1", int(completion)), timeout=5):
        return 1.0


ATTACKS = (loop, bomb, memory, children, segfault, exits, flood, writes, connects)
