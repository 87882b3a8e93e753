"""Software bill of materials: the locked packages and the members, as CycloneDX 1.6 in JSON on stdout.

usage: python release/sbom.py > dist/starling.cdx.json

It describes an installation by `make demo INSTALL=locked`. Nothing in it depends on the time or the machine but the
licences, which are those that the installed packages declare.
"""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

from lock import ROOT, LockedPackage, read


def document() -> dict[str, Any]:
    """Return the bill."""
    members = [tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("[ls]*/*/pyproject.toml"))]
    components = [member_component(member) for member in members] + [component(package) for package in read()]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "starling", "version": members[0]["version"]}},
        "components": components,
    }


def component(package: LockedPackage) -> dict[str, Any]:
    """Return a third-party package."""
    found: dict[str, Any] = {
        "type": "library",
        "name": package.name,
        "version": package.version,
        "purl": f"pkg:pypi/{package.name}@{package.version.replace('+', '%2B')}",
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in package.hashes],
    }
    licence = _licence(package.name)
    return found | ({"licenses": [licence]} if licence else {})


def member_component(project: dict[str, Any]) -> dict[str, Any]:
    """Return a member."""
    name, version = project["name"], project["version"]
    licences = [{"expression": project["license"]}]
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": licences,
    }


def _licence(name: str) -> dict[str, Any] | None:
    """Return the licence that an installed package declares, None if it is not installed or declares none."""
    try:
        found = metadata(name)
    except PackageNotFoundError:
        return None
    if expression := found.get("License-Expression"):
        return {"expression": expression}
    named = [one.rpartition(" :: ")[2] for one in found.get_all("Classifier") or () if one.startswith("License ::")]
    return {"license": {"name": " / ".join(named)}} if named else None


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
