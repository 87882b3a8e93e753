"""Search of a process for what an earlier one may have left in it; runs in sandboxes, as a tool and in programs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys

PAGE_BYTES = 4096
KEPT: list[object] = []


def keep(*positional: object, **named: object) -> int:
    """Keep what this session was given; return its number."""
    KEPT.extend((*positional, *named.values()))
    return len(KEPT)


def find_in_process(pattern: str) -> list[str]:
    """Return where this process has a text that matches: its frames, objects, memory, or open files."""
    wanted = re.compile(pattern.encode())
    places = [("frames", _frames()), ("objects", _objects()), ("memory", _memory()), ("descriptors", _files())]
    return [f"{place}: {found.group().decode()}" for place, data in places if (found := wanted.search(data))]


def _frames() -> bytes:
    frame, texts = sys._getframe(), list[str]()
    while frame.f_back is not None:
        frame = frame.f_back
        texts += [repr(value) for value in frame.f_locals.values()]
    return "\n".join(texts).encode("utf-8", "replace")


def _objects() -> bytes:
    """Return the texts that objects of the collector refer to, which it does not list themselves."""
    found = gc.get_referents(*gc.get_objects())
    return b"\n".join(
        one.encode("utf-8", "replace") if isinstance(one, str) else bytes(one)
        for one in found
        if isinstance(one, str | bytes | bytearray)
    )


def _memory() -> bytes:
    """Return the writable memory, or where it cannot be opened, the pages that have an object, freed parts included."""
    try:
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
            parts = list[bytes]()
            for line in maps.read().splitlines():
                ends, permissions = line.split()[:2]
                first, end = (int(address, 16) for address in ends.split("-"))
                if permissions.startswith("rw"):
                    with contextlib.suppress(OSError, OverflowError):  # a guard page, or one of the kernel's
                        memory.seek(first)
                        parts.append(memory.read(end - first))
            return b"\n".join(parts)
    except OSError:
        objects = gc.get_objects()
        pages = {id(one) // PAGE_BYTES for one in (*objects, *gc.get_referents(*objects))}
        return b"".join(ctypes.string_at(page * PAGE_BYTES, PAGE_BYTES) for page in sorted(pages))


def _files() -> bytes:
    parts = list[bytes]()
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            parts.append(os.pread(descriptor, 1 << 20, 0))
    return b"\n".join(parts)
