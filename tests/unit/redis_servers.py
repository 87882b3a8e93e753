"""Redis servers of tests: real processes, each on a free port, with a password, and with TLS where it is asked for."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

PROGRAM: Final = shutil.which("redis-server")
IS_EXPECTED: Final = "TESTS_NEED_REDIS" in os.environ
"""Whether the tests must not be skipped; `.ci/run` installs the server and says so."""
needs_redis = pytest.mark.skipif(
    PROGRAM is None and not IS_EXPECTED, reason="redis-server is not installed (apt-get install redis-server)"
)
PASSWORD: Final = "se/cr:et@1"
QUOTED: Final = "se%2Fcr%3Aet%401"
START_S: Final = 30.0


class RedisServer:
    """A server, which can be stopped, killed, suspended, and started again at the same port."""

    def __init__(self, folder: Path, *, durable: bool = True, tls: bool = False, options: tuple[str, ...] = ()) -> None:
        self._folder, self._durable, self._tls, self._options = folder, durable, tls, options
        folder.mkdir(parents=True, exist_ok=True)
        if tls:
            make_certificates(folder)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        scheme = "rediss" if self._tls else "redis"
        return f"{scheme}://:{QUOTED}@127.0.0.1:{self.port}/0"

    @property
    def ca_file(self) -> Path:
        return self._folder / "ca.pem"

    def start(self) -> None:
        """Start, and wait until connections are accepted."""
        assert PROGRAM is not None, "redis-server is not installed"
        files = [f"--tls-{name}-file {self._folder / one}" for name, one in (("cert", "s.pem"), ("key", "s.key"))]
        tls = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no", *" ".join(files).split()]
        settings = ["--bind", "127.0.0.1", "--dir", str(self._folder), "--save", "", "--requirepass", PASSWORD]
        settings += ["--appendonly", "yes" if self._durable else "no", "--appendfsync", "everysec"]
        ports = tls if self._tls else ["--port", str(self.port)]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([PROGRAM, *ports, *settings, *self._options], stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                return
            except OSError:
                assert time.monotonic() < end, (self._folder / "redis.log").read_text()
                time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Kill the server, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None


@contextmanager
def redis_server(folder: Path, *, durable: bool = True, tls: bool = False) -> Iterator[RedisServer]:
    """Run a server."""
    server = RedisServer(folder, durable=durable, tls=tls)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def make_certificates(folder: Path) -> None:
    """Write ca.pem, and s.pem and s.key, which it signs for 127.0.0.1."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    sign = ["openssl", "x509", "-req", "-in", "s.csr", "-CA", "ca.pem", "-CAkey", "ca.key"]
    calls = [
        ["openssl", "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority"],
        ["openssl", "req", *key[:5], "-keyout", "s.key", "-out", "s.csr", *name],
        [*sign, "-CAcreateserial", "-copy_extensions", "copy", "-days", "2", "-out", "s.pem"],
    ]
    for call in calls:
        subprocess.run(call, cwd=folder, check=True, capture_output=True, timeout=START_S)
