"""The catalogue's attempts, which are data: attempts.toml."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.testing.misbehaviour.case import Case


class _Catalogue(Struct, frozen=True, forbid_unknown_fields=True):
    case: list[Case]


ATTEMPTS = msgspec.toml.decode(Path(__file__).with_name("attempts.toml").read_bytes(), type=_Catalogue).case
