"""The port proxy: HTTP and WebSockets to programs inside, by host name (`{port}-{id}.{domain}`).

Modules: `hosts` (which sandbox a host name means), `heads` (what passes), both pure; `raw` (a client's connection whose
protocol changes), `proxy` (who may, and the exchange).
"""

from __future__ import annotations

from dsec.api.ports.proxy import PortProxy

__all__ = ["PortProxy"]
