"""The composition of a cluster's edge that runs in one virtual machine: `dsec edge --in-vm`.

The edge in it joins the cluster by itself: its credentials are files of its state, the cluster's servers are reached
through the shield's way out, and apiservers reach it where the process on the host listens, which passes bytes on and
sees nothing of them where the edge serves HTTPS.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from dsec.api.serve import check_address
from dsec.app import run_server
from dsec.app_cluster import LOOPBACK, Joining, Listening, edge_credentials
from dsec.app_shield import Inner, prepare, run_shield
from dsec.backends.microvm.shield import PORT, STATE, ShieldShape
from dsec.backends.microvm.shield_out import servers_of
from dsec.cluster.credentials import Credentials
from dsec.errors import InvalidRequest

CREDENTIALS = "cluster/edge.json"
AUTHORITY = "cluster/ca.pem"


def serve_edge_in_vm(
    joining: Joining,
    listening: Listening,
    *,
    shape: ShieldShape,
    state: Path | None = None,
    labels: dict[str, str] | None = None,
    on_exit: str = "keep",
) -> int:
    """An edge, in a machine, in the foreground until SIGTERM or SIGINT. Returns the exit code. Raises `InvalidRequest`,
    `Unavailable`, `Unsupported`."""
    check_address(listening.host, listening.port)
    config = prepare(state, listening.log_format, listening.log_level)
    tls = not LOOPBACK.match(listening.host) if listening.tls is None else listening.tls

    async def run() -> int:
        credentials = await edge_credentials(joining, config.state)
        inner = inner_edge(joining, credentials, advertise=listening.advertise, tls=tls, labels=labels or {})
        scheme = "https" if tls else "http"
        keep = on_exit == "keep"
        return await run_shield(config, inner, listening.host, listening.port, shape, keep=keep, scheme=scheme)

    return run_server(run())


def inner_edge(
    joining: Joining, credentials: Credentials, *, advertise: str, tls: bool, labels: dict[str, str]
) -> Inner:
    """The edge in the machine. Raises `InvalidRequest`, `Unsupported`."""
    files: dict[str, str] = {}
    if credentials.ca_file:
        try:
            files[AUTHORITY] = Path(credentials.ca_file).read_text()
        except OSError as error:
            raise InvalidRequest(f"{credentials.ca_file} can't be read: {error.strerror}") from None
        credentials = replace(credentials, ca_file=f"{STATE}/{AUTHORITY}")
    files[CREDENTIALS] = msgspec.json.encode(credentials).decode()
    servers = servers_of(joining.urls)

    def argv(url: str) -> list[str]:
        words = ["edge", "--host", "127.0.0.1", "--port", str(PORT), "--tls" if tls else "--no-tls"]
        words += ["--credentials", f"{STATE}/{CREDENTIALS}", "--plain", "--advertise", advertise or url]
        for each in servers.urls:
            words += ["--join", each]
        for name, value in sorted(labels.items()):
            words += ["--label", f"{name}={value}"]
        return words

    return Inner(
        argv=argv,
        files=files,
        servers=servers,
        client=False,
        network=True,
        edge=credentials.edge,
        extras=("cluster",),
    )
