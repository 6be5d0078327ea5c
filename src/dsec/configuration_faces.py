"""How a server's faces for clients of other systems are set: files in its state directory. Apart from the rest of the
configuration, which processes without HTTP read too.
"""

from __future__ import annotations

import msgspec

from dsec.api.e2b import E2bConfig
from dsec.api.sandboxfusion import FusionConfig
from dsec.configuration import Config
from dsec.errors import InvalidRequest


def read_e2b(config: Config) -> E2bConfig:
    """How the E2B face is set: `e2b.json` in the state directory, or the defaults. Raises `InvalidRequest`."""
    path = config.state / "e2b.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=E2bConfig)
    except FileNotFoundError:
        return E2bConfig()
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{path}: {error}", remedy="docs/E2B.md says what it may hold.") from error


def read_fusion(config: Config) -> FusionConfig:
    """How SandboxFusion's calls are served: `sandboxfusion.json` in the state directory, or the defaults. Raises
    `InvalidRequest`."""
    path = config.state / "sandboxfusion.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=FusionConfig)
        found.check()
    except FileNotFoundError:
        return FusionConfig()
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"{path}: {error}", remedy="docs/SANDBOXFUSION.md says what it may hold.") from error
    return found
