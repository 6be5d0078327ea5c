"""How the E2B face of a server is set: the names that templates go by, and what the internet means to whom.

Owns the form of `e2b.json` in the state directory (docs/E2B.md); `dsec.app` reads it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from dsec.spec.network import Network

Internet = Literal["refuse", "ignore"]

TEMPLATES = {"base": "debian", "code-interpreter-v1": "debian"}
"""E2B's own template names, and the environment that stands in for each."""


class KeyPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for the API keys of one label."""

    internet: Internet


class E2bConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the E2B face."""

    templates: dict[str, str] = msgspec.field(default_factory=TEMPLATES.copy)
    """Template name -> environment. Any other template name is an environment's."""
    domain: str | None = None
    """Where sandboxes are served by host name (`{port}-{id}.{domain}`), with a port where it isn't the scheme's own;
    told to clients. None: `localhost` with the server's port."""
    public_traffic: bool = True
    """Whether ports of a sandbox are public where its creation doesn't say `allowPublicTraffic`: E2B's own default."""
    internet: Internet = "refuse"
    """What `allow_internet_access=True` does: `refuse` says that there is no network; `ignore` makes the sandbox
    without one. An absent value is always a sandbox without network."""
    build_network: Network = {}
    """What commands of template builds may reach; the key that builds must be able to grant it."""
    keys: dict[str, KeyPolicy] = {}
    """Label of an API key -> what is different for it."""

    def environment(self, template: str) -> str:
        """The environment of a template name; a tag after a colon is dropped where the whole is no known name."""
        template = template.removesuffix(":default")
        return self.templates.get(template) or self.templates.get(template.partition(":")[0]) or template

    def internet_for(self, label: str) -> Internet:
        """The policy of the API keys with this label."""
        policy = self.keys.get(label)
        return self.internet if policy is None else policy.internet
