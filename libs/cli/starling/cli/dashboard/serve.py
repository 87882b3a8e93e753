"""Process of the dashboard: token, watches of the runs, HTTP server, and their end."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from starling.cli.dashboard.access import Guard, make_token
from starling.cli.dashboard.app import Dashboard, application
from starling.cli.dashboard.watch import RunWatch, watch_names
from starling.cli.run.attempt import Attempt, has_run
from starling.cli.runs.files.history import check_different
from starling.common.errors import ConfigError
from starling.common.files import open_own
from starling.common.http.server import HttpAddress, HttpServer

HEADERS_S: Final = 10.0
UNREAD_S: Final = 30.0
TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{22,200}")
"""At least 128 bits in base64."""
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Options:
    """The command line."""

    runs: tuple[Path, ...]
    host: str
    port: int
    may_control: bool
    key: Path | None
    token_file: Path | None
    address_file: Path | None
    names: tuple[str, ...]


def serve(options: Options) -> int:
    """Serve the page until SIGINT or SIGTERM. Returns the exit code. Raises ConfigError."""
    folders = list(options.runs) or [Attempt.find(None).folder.parent]
    check_different(folders)
    token = make_token() if options.token_file is None else _kept_token(options.token_file)
    _check_free(options.host, options.port)
    closing = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _close(closing, number, frame))
    watches = [
        RunWatch(number, folder, name)
        for number, (folder, name) in enumerate(zip(folders, watch_names(folders), strict=True))
    ]
    page = Dashboard(watches, options.may_control, options.key, closing)
    guard = Guard(application(page), token, options.names)
    with ExitStack() as stack:
        address = HttpAddress(options.host, options.port, "dashboard")
        server = HttpServer(guard, address, headers_s=HEADERS_S, unread_s=UNREAD_S)
        stack.callback(server.close)
        for watch in watches:
            stack.callback(watch.stop)
            watch.start()
        server.start()
        server.wait_started()
        _announce(options, server, token, len(watches))
        for folder in folders:
            if not has_run(folder):
                print(f"starling: there is no run in {folder} yet; the page waits for one", file=sys.stderr, flush=True)
        while not closing.wait(3600.0):
            pass
    return 0


def _announce(options: Options, server: HttpServer, token: str, num: int) -> None:
    what = "it shows and controls" if options.may_control else "it only shows"
    address = f"{server.url}/#token={token}"
    if options.address_file is not None:
        _write_address(options.address_file, address)
    print(f"dashboard: {address if options.address_file is None else server.url}", flush=True)
    where = (
        "the address contains the token" if options.address_file is None else f"{options.address_file} has the token"
    )
    print(f"{what} {num} run{'s' if num != 1 else ''}; {where}; Ctrl-C ends it", flush=True)
    if options.host not in LOOPBACK:
        print(
            f"starling: {options.host} is reached by others, and HTTP is not encrypted: let only a trusted network or "
            "a server with TLS reach it",
            file=sys.stderr,
            flush=True,
        )


def _write_address(path: Path, address: str) -> None:
    """Write the address to a file that only its owner can read. Raises ConfigError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(f"{address}\n")
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --address-file") from None


def _close(closing: threading.Event, number: int, frame: FrameType | None) -> None:
    closing.set()


def _check_free(host: str, port: int) -> None:
    """Raise ConfigError when nothing can listen there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"the page cannot be served at {host}:{port} ({reason}); give another --host or --port"
        ) from None


def _kept_token(path: Path) -> str:
    """Return the token in a file, which is made where it is not there. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read_token(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --token-file") from None
    token = make_token()
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{token}\n")
    return token


def _read_token(path: Path) -> str:
    try:
        with os.fdopen(open_own(path), "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(1000).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give another --token-file") from None
    if status.st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others; `chmod 600 {path}`, or remove it to have a new token")
    if not TOKEN.fullmatch(text):
        raise ConfigError(f"{path} has no token of at least 22 letters, digits, - and _; remove it to have a new one")
    return text
