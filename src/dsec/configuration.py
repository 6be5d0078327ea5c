"""The server's configuration: the only place that reads it, but for what its foreign faces are told
(`configuration_faces.py`).

By argument or environment: `DSEC_STATE` (default /var/lib/dsec), `DSEC_RUN` (default /run/dsec),
`DSEC_STORE` (the store that nodes share; default none), `DSEC_CACHE_GIB` (of layers that are filled on demand; default
64), `DSEC_REGISTRY` (of images that don't name one), `DSEC_REGISTRIES` (which callers may name; default `*`: any at a
public address), `DSEC_DOCKER_LOGIN` (projects for which the server uses its own Docker login; default none),
`DSEC_ZRAM_BYTES` (of compressed swap, on a host without swap),
`DSEC_LASTING_RECORDS` (1: records of sandboxes and keys survive the machine's death, and wait for the disk; default 0),
`DSEC_VM_ACCEL` (`kvm` or `tcg`; default: kvm where it is fit), `DSEC_VM_SPARE` (of machines: how many to have ready),
`DSEC_VM_PAUSE` (of microVMs: `page_out`, or `suspend` to a file; default page_out),
`DSEC_VMM` (of microVMs: `qemu`, `firecracker`, or `firecracker+uffd`, whose memory our own handler serves page by page;
default: Firecracker where its program, a fit KVM and a built kernel are there).
What doesn't outlive a boot is in `<DSEC_RUN>/<instance>`, where the instance is a short digest of the state directory's
path, so that several servers fit on one host.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.errors import InvalidRequest
from dsec.kernel.census import instance_of
from dsec.store.lazy.service import Way
from dsec.store.registries import Registries


class Config(Struct, frozen=True, kw_only=True):
    """Where a server keeps what."""

    state: Path
    run: Path
    store: str = ""
    """URL of the store that nodes share, as `open_store` takes it; empty: none."""
    edge: int | None = None
    """Its number in a cluster; None: there is none."""
    registries: Registries = Registries()
    """Which callers may name."""
    lazy: Way = ""
    """How reads of layers get to what fills them; empty: as the kernel can."""
    cache_bytes: int = 64 << 30
    """Of data of layers that are filled on demand; the least recently used goes."""
    vm_accel: str = ""
    """What runs code of virtual machines: kvm, tcg; empty: kvm where it is fit."""
    vm_monitor: str = ""
    """What runs microVMs: qemu, firecracker, firecracker+uffd; empty: what the host can."""
    vm_spare: int = 2
    """Virtual machines to have ready of a kind that is in use."""
    weights: dict[str, float] = {}
    """Of projects, where function calls and the judge have no room for all; others have 1."""
    lasting_records: bool = False
    """Records survive the machine's death, at the price of waiting for the disk."""
    vm_suspend: bool = False
    """A paused microVM's memory goes to a file and its VMM ends; else it is frozen and paged out."""
    zram_bytes: int | None = None
    """What compressed swap may take where the host has no swap; 0: make none. None: a quarter of the memory."""

    @property
    def cache(self) -> Path:
        """Of layers that are filled on demand."""
        return self.state / "store" / "lazy"

    @property
    def instance(self) -> str:
        """Names this server's cgroups and units on the host."""
        return self.run.name


def read_config(state: Path | None = None) -> Config:
    """The configuration from arguments and environment."""
    state = (state or Path(os.environ.get("DSEC_STATE") or "/var/lib/dsec")).absolute()
    run = Path(os.environ.get("DSEC_RUN") or "/run/dsec") / instance_of(state)
    registries = Registries(
        default=os.environ.get("DSEC_REGISTRY", ""),
        named=tuple(os.environ.get("DSEC_REGISTRIES", "*").split()),
        docker_login=tuple(os.environ.get("DSEC_DOCKER_LOGIN", "").split()),
    )
    way = os.environ.get("DSEC_LAZY", "")
    if way not in ("", "events", "fuse"):
        raise InvalidRequest(f"DSEC_LAZY is {way!r}", remedy="It is events, fuse, or not set.")
    cache_gib = os.environ.get("DSEC_CACHE_GIB") or "64"
    if not cache_gib.isdecimal() or int(cache_gib) < 1:
        raise InvalidRequest(f"DSEC_CACHE_GIB is {cache_gib!r}", remedy="It is a number of GiB, at least 1.")
    zram_bytes = os.environ.get("DSEC_ZRAM_BYTES")
    if zram_bytes and not (zram_bytes.isascii() and zram_bytes.isdigit()):
        raise InvalidRequest(f"DSEC_ZRAM_BYTES={zram_bytes!r} is not a number of bytes")
    accel, spare = os.environ.get("DSEC_VM_ACCEL", ""), os.environ.get("DSEC_VM_SPARE") or "2"
    if accel not in ("", "kvm", "tcg"):
        raise InvalidRequest(f"DSEC_VM_ACCEL is {accel!r}", remedy="It is kvm, tcg, or not set.")
    monitor = os.environ.get("DSEC_VMM", "")
    if monitor not in ("", "qemu", "firecracker", "firecracker+uffd"):
        raise InvalidRequest(
            f"DSEC_VMM is {monitor!r}", remedy="It is qemu, firecracker, firecracker+uffd, or not set."
        )
    if not spare.isdecimal():
        raise InvalidRequest(f"DSEC_VM_SPARE is {spare!r}", remedy="It is a number of machines.")
    weights = {}
    for word in os.environ.get("DSEC_WEIGHTS", "").split():
        project, _, weight = word.rpartition("=")
        if not project or not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", weight) or not float(weight):
            raise InvalidRequest(f"DSEC_WEIGHTS has {word!r}", remedy="It is PROJECT=NUMBER each, the number above 0.")
        weights[project] = float(weight)
    lasting = os.environ.get("DSEC_LASTING_RECORDS", "0")
    if lasting not in ("0", "1"):
        raise InvalidRequest(f"DSEC_LASTING_RECORDS is {lasting!r}", remedy="It is 0, 1, or not set.")
    pause = os.environ.get("DSEC_VM_PAUSE", "")
    if pause not in ("", "page_out", "suspend"):
        raise InvalidRequest(f"DSEC_VM_PAUSE is {pause!r}", remedy="It is page_out, suspend, or not set.")
    return Config(
        state=state,
        run=run,
        store=os.environ.get("DSEC_STORE", ""),
        registries=registries,
        lazy=msgspec.convert(way, Way),
        cache_bytes=int(cache_gib) << 30,
        vm_accel=accel,
        vm_monitor=monitor,
        vm_spare=int(spare),
        weights=weights,
        lasting_records=lasting == "1",
        vm_suspend=pause == "suspend",
        zram_bytes=int(zram_bytes) if zram_bytes else None,
    )
