"""Versions and features: what this library writes, and what it refuses (FORMAT.md section 12)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from checkrun_format.errors import DamagedError, UnsupportedFeatureError, UnsupportedVersionError

__version__ = "0.9.0"

FORMAT_VERSION = "0.9"
"""Format version of everything that this library writes."""

FEATURES: frozenset[str] = frozenset()
"""Names that may stand in `requires` and that this library knows. Version 0.9 defines none."""

_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")


def check_version(version: str, place: str) -> None:
    """Refuse a document of a version that this library does not read (VER-1).

    Raises
    ------
    UnsupportedVersionError
        For another major version, and below 1.0 for another minor one.
    DamagedError
        If `version` is no version at all.
    """
    match = _VERSION.fullmatch(version)
    if match is None:
        raise DamagedError(place, f"format_version {version!r} is not MAJOR.MINOR")
    major, minor = map(int, match.groups())
    our_major, our_minor = map(int, FORMAT_VERSION.split("."))
    if major != our_major or (major == 0 and minor != our_minor):
        raise UnsupportedVersionError(
            f"{place} was written in format version {version}; checkrun-format {__version__} reads {FORMAT_VERSION}. "
            "Install a release that reads it"
        )


def check_features(requires: Iterable[str], what: str) -> None:
    """Refuse what needs a feature that this library does not know (VER-2).

    Raises
    ------
    UnsupportedFeatureError
        Naming the unknown features.
    """
    unknown = sorted(set(requires) - FEATURES)
    if unknown:
        raise UnsupportedFeatureError(
            f"{what} requires {', '.join(unknown)}, unknown to checkrun-format {__version__}. "
            "Install a release that knows it"
        )
