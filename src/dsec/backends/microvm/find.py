"""Finding out whether this host can run virtual machines, and with what."""

from __future__ import annotations

import contextlib
import platform
import shutil
from pathlib import Path
from typing import Literal

from dsec.backends.microvm.node import VmNode
from dsec.errors import Unsupported
from dsec.kernel import kvm
from dsec.kernel.cgroups import CgroupRoot
from dsec.kernel.host import Finding
from dsec.kernel.probes import program
from dsec.store.kernels import KernelStore
from dsec.vmm.driver import VmmDriver
from dsec.vmm.firecracker import PROGRAM as FIRECRACKER
from dsec.vmm.firecracker import FirecrackerDriver, Memory
from dsec.vmm.node import VmHost
from dsec.vmm.qemu import PROGRAM as QEMU
from dsec.vmm.qemu import QemuDriver


def find_node(
    host: VmHost, cgroups: CgroupRoot, *, accel: str, monitor: str, spare: int, templates: Path | None = None
) -> VmNode | None:
    """None where this host can run no machines. `accel`: kvm or tcg; empty: kvm where it is fit, which takes a moment
    to find out. `monitor`: as `DSEC_VMM`. `spare`: clones to have ready. `templates`: where they are kept. Raises
    `Unsupported` where a monitor is named that can't be used."""
    if platform.machine() != "x86_64":
        return None
    chosen: Literal["kvm", "tcg"] = "kvm" if accel == "kvm" else "tcg"
    reason = f"the server was told to use {chosen}"
    if not accel and (shutil.which(QEMU) or shutil.which(FIRECRACKER)):
        found = kvm.probe()
        chosen, reason = "kvm" if found.fit else "tcg", found.detail
    driver = _driver(host, chosen, monitor, reason)
    if driver is None:
        return None
    return VmNode(host, driver, cgroups, accel_reason=reason, spare=spare, templates=templates)


def _driver(host: VmHost, accel: Literal["kvm", "tcg"], monitor: str, reason: str) -> VmmDriver | None:
    """Firecracker where all that it needs is there, else QEMU; or what was named."""
    if monitor.startswith(FIRECRACKER):
        if accel != "kvm":
            raise Unsupported(f"Firecracker needs KVM: {reason}", remedy="Leave DSEC_VMM out.", field="DSEC_VMM")
        paged: Memory = "Uffd" if monitor.endswith("+uffd") else "File"
        return FirecrackerDriver.find(memory=paged, build_native=host.build_guest)
    if not monitor and accel == "kvm":
        with contextlib.suppress(Unsupported):
            KernelStore(host.state).best(built=True)
            return FirecrackerDriver.find(build_native=host.build_guest)
    with contextlib.suppress(Unsupported):
        return QemuDriver.find(accel)
    return None


def probe_machines(state: Path) -> list[Finding]:
    """What `dsec doctor` says: QEMU, KVM's fitness, a kernel to boot, DAX, Firecracker. Takes a second at most; leaves
    nothing."""
    fit = kvm.probe()
    return [_probe_qemu(), _probe_kvm(fit), _probe_kernel(state), _DAX, _probe_firecracker(fit, state)]


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


def _probe_kvm(found: kvm.Fitness) -> Finding:
    remedy = (
        "" if found.fit else "Machines run on an imitated CPU (tcg), many times slower; a host with KVM does better."
    )
    return Finding("KVM for guests", found.fit, remedy, found.detail, False)


def _probe_kernel(state: Path) -> Finding:
    name = "kernel for microVMs"
    try:
        kernel = KernelStore(state).best()
    except Unsupported as error:
        return Finding(name, False, error.remedy, error.message, False)
    words = f"{kernel.release}, {kernel.origin} ({kernel.machine})"
    if kernel.gives_back:
        return Finding(name, True, "", words, False)
    return Finding(
        name, True, "Run `dsec kernel import` again.", f"{words}; machines give back no memory that they freed", False
    )


_DAX = Finding(
    "layers of machines by DAX",
    False,
    "None is needed: layers are read by virtio-blk.",
    "not used in this version: Linux 6.1 can't have a page in two files, as our layers do (docs/VM.md, DAX)",
    False,
)


def _probe_firecracker(fit: kvm.Fitness, state: Path) -> Finding:
    name = "Firecracker"
    never = "never run by this project's tests, which check what it is told against its published API"
    try:
        driver = FirecrackerDriver.find(build_native=lambda: state)
    except Unsupported as error:
        return Finding(name, False, f"QEMU is used. {error.remedy}", f"{error.message}; {never}", False)
    if not fit.fit:
        return Finding(name, False, "QEMU is used.", f"{driver.version}; it needs KVM; {never}", False)
    try:
        KernelStore(state).best(built=True)
    except Unsupported as error:
        return Finding(
            name, False, f"QEMU is used. {error.remedy}", f"{driver.version}; {error.message}; {never}", False
        )
    return Finding(name, True, "", f"{driver.version}; {never}", False)
