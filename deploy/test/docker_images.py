"""The images of deploy/images, built by its bake file on a base image that is made of Debian's packages."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import pytest
from docker_host import DockerHost, run

ROOT: Final = Path(__file__).parents[2]
PYTHON_IMAGE: Final = "starling-test/python:3.11"
PACKAGES: Final = "python3,python3-venv,python3-dev,ca-certificates"
PATH: Final = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
BASE: Final = f"""
FROM starling-test/debian:12
COPY certificates {CERTIFICATES}
RUN ln -sf python3 /usr/bin/python
ENV SSL_CERT_FILE={CERTIFICATES} PIP_CERT={CERTIFICATES}
"""
TARGETS: Final = {
    "controller": "starling-controller:{}",
    "cli": "starling-cli:{}",
    "reward-rules": "starling-reward:{}-rules",
    "policy-cpu": "starling-policy:{}-cpu",
    "rollout-cpu": "starling-rollout:{}-cpu",
}
"""Targets of the bake file, and the tag of each. Not `reward-media`, which is large and has a test of its own parts."""
VERSION: Final = "test"


def build(host: DockerHost, folder: Path) -> None:
    """Build the images with the tag `VERSION`; what `folder` and the daemon have of an earlier build is used again."""
    environment = {**host.environment, "VERSION": VERSION}
    if host.machine:
        _make_base(host, folder)
        environment["PYTHON_IMAGE"] = PYTHON_IMAGE
    with _served_wheels(host, folder / "port") as url:
        if url:
            environment |= {"PIP_FIND_LINKS": url, "PIP_TRUSTED_HOST": host.machine}
        elif Path(environment.get("PIP_FIND_LINKS") or "/nothing").is_dir():
            del environment["PIP_FIND_LINKS"]  # which a daemon that is not ours does not see
        bake = ("docker", "buildx", "bake", "--progress=plain", "--file", "deploy/images/docker-bake.hcl")
        run(*bake, *TARGETS, environment=environment, folder=ROOT, timeout_s=3600.0)


def sizes(host: DockerHost) -> dict[str, int]:
    """Return the bytes of each image."""
    inspect = ("image", "inspect", "--format", "{{.Size}}")
    return {tag.format("VERSION"): int(host.docker(*inspect, tag.format(VERSION))) for tag in TARGETS.values()}


def _make_base(host: DockerHost, folder: Path) -> None:
    """Make an image like python:3.11-slim, with this machine's certificates, where no registry is reached."""
    if host.docker("images", "--quiet", PYTHON_IMAGE).strip():
        return
    if shutil.which("mmdebstrap") is None:
        pytest.skip("needs mmdebstrap, to make the base image")
    tree = folder / "debian.tar"
    make = ("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", tree)
    run(*make, "http://deb.debian.org/debian", environment=dict(os.environ), timeout_s=1800.0)
    host.docker("import", "--change", PATH, tree, "starling-test/debian:12")
    tree.unlink()
    context = folder / "base"
    context.mkdir(exist_ok=True)
    shutil.copy(CERTIFICATES, context / "certificates")
    (context / "Dockerfile").write_text(BASE)
    host.docker("buildx", "build", "--tag", PYTHON_IMAGE, context)


@contextmanager
def _served_wheels(host: DockerHost, port: Path) -> Iterator[str]:
    """Serve the folder of PIP_FIND_LINKS to builds, which see no folder of this machine; else yield nothing.

    At the port of the last time, which is in a file, if it is free: layers are built again for another URL.
    """
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    if not wheels or not host.machine or not Path(wheels).is_dir():
        yield ""
        return
    handler = functools.partial(SimpleHTTPRequestHandler, directory=wheels)
    with _server(handler, int(port.read_text()) if port.exists() else 0) as server:
        port.write_text(str(server.server_port))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{host.machine}:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join(60.0)


def _server(handler: Callable[..., SimpleHTTPRequestHandler], port: int) -> ThreadingHTTPServer:
    with suppress(OSError):
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    return ThreadingHTTPServer(("127.0.0.1", 0), handler)
