"""Makes all gateways of a node from its configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.egress.gateways.apt import AptGateway
from dsec.egress.gateways.base import BaseGateway, Shared
from dsec.egress.gateways.cache import Cache
from dsec.egress.gateways.config import GatewaysConfig, read_config
from dsec.egress.gateways.generic import HttpGateway
from dsec.egress.gateways.git import GitGateway
from dsec.egress.gateways.go import GoGateway
from dsec.egress.gateways.inference import InferenceGateway
from dsec.egress.gateways.npm import NpmGateway
from dsec.egress.gateways.outside import AddressCheck, Outside, is_public
from dsec.egress.gateways.pypi import PypiGateway
from dsec.egress.gateways.secrets import Secrets


@asynccontextmanager
async def open_gateways(
    state: Path, *, config: GatewaysConfig | None = None, address_check: AddressCheck = is_public
) -> AsyncIterator[Sequence[BaseGateway]]:
    """The gateways, for as long as the context lasts. `state`: where `gateways.toml` and `secrets.toml` are, and the
    cache (`cache/gateways`). `address_check` says where names may lead that the configuration doesn't name.

    Raises `InvalidRequest` for a configuration that isn't one.
    """
    config = read_config(state) if config is None else config
    outside = Outside(
        trusted=config.trusted(),
        address_check=address_check,
        connect_timeout_s=config.connect_timeout_s,
        read_timeout_s=config.read_timeout_s,
    )
    cache = Cache(state / "cache" / "gateways", config.cache_bytes)
    shared = Shared(config, outside, cache, Secrets(state))
    kinds = (PypiGateway, NpmGateway, AptGateway, GitGateway, GoGateway, HttpGateway, InferenceGateway)
    try:
        yield [kind(shared) for kind in kinds]
    finally:
        await cache.close()
        await outside.close()
