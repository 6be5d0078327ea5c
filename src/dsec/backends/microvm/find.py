"""Finding out whether this host can run virtual machines, and with what."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

from dsec.backends.microvm.node import VmNode
from dsec.errors import Unsupported
from dsec.kernel import kvm
from dsec.kernel.cgroups import CgroupRoot
from dsec.kernel.host import Finding
from dsec.kernel.probes import program
from dsec.store.kernels import KernelStore
from dsec.vmm.node import VmHost
from dsec.vmm.qemu import QemuDriver


def find_node(
    host: VmHost, cgroups: CgroupRoot, *, accel: str, spare: int, templates: Path | None = None
) -> VmNode | None:
    """None where this host can run no machines. `accel`: kvm or tcg; empty: kvm where it is fit, which takes a moment
    to find out. `spare`: clones to have ready. `templates`: where they are kept."""
    if platform.machine() != "x86_64":
        return None
    chosen: Literal["kvm", "tcg"] = "kvm" if accel == "kvm" else "tcg"
    reason = f"the server was told to use {chosen}"
    try:
        QemuDriver.find(chosen)
    except Unsupported:
        return None
    if not accel:
        found = kvm.probe()
        chosen, reason = "kvm" if found.fit else "tcg", found.detail
    driver = QemuDriver.find(chosen)
    return VmNode(host, driver, cgroups, accel_reason=reason, spare=spare, templates=templates)


def probe_machines(state: Path) -> list[Finding]:
    """What `dsec doctor` says: QEMU, KVM's fitness, a kernel to boot. Takes a second at most; leaves nothing."""
    return [_probe_qemu(), _probe_kvm(), _probe_kernel(state)]


def _probe_qemu() -> Finding:
    name = "microVMs"
    if platform.machine() != "x86_64":
        return Finding(name, False, "", f"not on {platform.machine()} in this version", False)
    if program("mkfs.ext4") is None:
        return Finding(name, False, "apt-get install e2fsprogs", "mkfs.ext4 is missing", False)
    try:
        return Finding(name, True, "", QemuDriver.find("tcg").version, False)
    except Unsupported as error:
        return Finding(name, False, error.remedy, error.message, False)


def _probe_kvm() -> Finding:
    found = kvm.probe()
    remedy = (
        "" if found.fit else "Machines run on an imitated CPU (tcg), many times slower; a host with KVM does better."
    )
    return Finding("KVM", found.fit, remedy, found.detail, False)


def _probe_kernel(state: Path) -> Finding:
    name = "kernel for microVMs"
    try:
        kernel = KernelStore(state).best()
    except Unsupported as error:
        return Finding(name, False, error.remedy, error.message, False)
    return Finding(name, True, "", f"{kernel.release}, {kernel.origin} ({kernel.machine})", False)
