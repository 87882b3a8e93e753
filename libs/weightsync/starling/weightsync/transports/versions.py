"""Version ranges of the libraries whose internals the transports rely on."""

from __future__ import annotations

from dataclasses import dataclass

from starling.common.errors import WeightsError


@dataclass(frozen=True)
class SupportedVersions:
    """The first version of a library that works with this code, and the first that may not, as (major, minor)."""

    library: str
    low: tuple[int, int]
    high: tuple[int, int]
    extra: str
    """Extra of the package ``starling-weightsync`` that installs it."""

    def check(self, version: str) -> None:
        """Refuse a version outside the range.

        Raises:
            WeightsError: naming the version and the range.
        """
        installed = tuple(int(number) for number in version.split(".")[:2] if number.isdecimal())
        if not self.low <= installed < self.high:
            wanted = f">={self.low[0]}.{self.low[1]}, <{self.high[0]}.{self.high[1]}"
            raise WeightsError(
                f"{self.library} {version} is installed, expected {wanted}: install starling-weightsync[{self.extra}]."
            )
