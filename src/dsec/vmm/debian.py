"""A bootable Debian disk with systemd, made by mmdebstrap of what this host's apt reaches.

GPT: a boot partition (FAT, systemd-boot for UEFI; SYSLINUX for BIOS where this host has it) and the root file system
(ext4), which grows to the disk's end at boot. No loop device, no mount: the file systems are written as files. root has
no password on its consoles, which only the sandbox's owner reaches.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

from dsec.errors import PlatformError, Unsupported
from dsec.kernel import mounts
from dsec.store.build import Progress, apt_options, host_sources, host_suite, run_builder, scrub
from dsec.vmm import fat, seed

MIB = 1 << 20
PACKAGES = (
    "systemd", "systemd-sysv", "systemd-boot-efi", "udev", "kmod", "linux-image-cloud-amd64", "initramfs-tools", "lz4",
    "procps",
)  # fmt: skip
BOOT_MIB = 64
SPARE_MIB = 96
"""Room in the root file system before it grows."""
ROOT_LABEL = "dsec-root"
_CMDLINE = (
    f"root=LABEL={ROOT_LABEL} rw console=tty0 console=ttyS0,115200 loglevel=4 nowatchdog no_timer_check "
    "random.trust_cpu=on mitigations=off"
)
_HOOK = """\
#!/bin/sh
set -e
mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/etc/initramfs-tools/hooks"
printf 'MODULES=list\\nCOMPRESS=lz4\\n' >"$1/etc/initramfs-tools/conf.d/dsec"
printf '#!/bin/sh\\n[ "$1" = prereqs ] && exit 0\\n. /usr/share/initramfs-tools/hook-functions\\n\
for m in virtio_pci virtio_blk ahci ata_piix sd_mod; do manual_add_modules $m; done\\n' \
>"$1/etc/initramfs-tools/hooks/dsec"
chmod 755 "$1/etc/initramfs-tools/hooks/dsec"
"""
_MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer",
           "systemd-pstore.service", "e2scrub_reap.service")  # fmt: skip
_SYSLINUX = Path("/usr/lib/syslinux/mbr/gptmbr.bin")


def build(scratch: Path, packages: Sequence[str] = (), progress: Progress | None = None) -> Path:
    """Make the disk, a raw file in `scratch`; `packages` beside what it needs. Blocks for about a minute, downloads
    included. Raises `Unsupported` where a tool is missing, `PlatformError` with the last words of what failed."""
    say = progress or (lambda _: None)
    for tool, package in (("mmdebstrap", "mmdebstrap"), ("mkfs.ext4", "e2fsprogs"), ("sfdisk", "fdisk")):
        if _which(tool) is None:
            raise Unsupported(f"{tool} is missing", remedy=f"apt-get install {package}")
    top = scratch / "root"
    _bootstrap(scratch, top, (*PACKAGES, *packages), say)
    say("making the disk")
    boot = _boot_files(top)
    _settle(top)
    disk = scratch / "disk"
    used = int(_ran("du", "-sm", "--apparent-size", str(top)).split()[0])
    root_mib = int(used * 1.1) + SPARE_MIB
    with disk.open("xb") as file:
        file.truncate((1 + BOOT_MIB + root_mib + 1) * MIB)
    root = scratch / "root.ext4"
    _ran("mkfs.ext4", "-q", "-F", "-m", "0", "-L", ROOT_LABEL, "-O", "^has_journal", "-E", "nodiscard", "-d", str(top),
         str(root), f"{root_mib}M")  # fmt: skip
    _partition(disk, root_mib)
    _put(disk, fat.make(boot, "BOOT", BOOT_MIB * MIB, hidden=MIB // fat.SECTOR), MIB)
    _copy(root, disk, (1 + BOOT_MIB) * MIB)
    root.unlink()
    if (program := _which("syslinux")) and _SYSLINUX.is_file():
        _ran(program, "--install", "--offset", str(MIB), str(disk))
        _put(disk, _SYSLINUX.read_bytes()[:440], 0)
    shutil.rmtree(top, ignore_errors=True)
    return disk


def _bootstrap(scratch: Path, top: Path, packages: Sequence[str], say: Progress) -> None:
    config, hook, suite = scratch / "apt.conf", scratch / "hook", host_suite()
    config.write_text("".join(f"{line}\n" for line in apt_options()))
    hook.write_text(_HOOK)
    hook.chmod(0o755)
    command = ["mmdebstrap", "--mode=root", "--variant=essential", "--format=directory", f"--aptopt={config}"]
    command += ["--dpkgopt=force-unsafe-io", f"--essential-hook={hook}", f"--include={','.join(packages)}"]
    try:
        run_builder([*command, suite, str(top), *map(str, host_sources(suite))], say)
    finally:
        mounts.unmount_under(str(scratch))
    scrub(top)


def _boot_files(top: Path) -> dict[str, bytes]:
    """What the firmware reads; the kernel leaves the root file system."""
    kernel, first = (next(top.glob(f"boot/{name}-*"), None) for name in ("vmlinuz", "initrd.img"))
    if kernel is None or first is None:
        raise PlatformError("the kernel package left no kernel in /boot")
    loader = top / "usr/lib/systemd/boot/efi/systemd-bootx64.efi"
    found = {
        "EFI/BOOT/BOOTX64.EFI": loader.read_bytes(),
        "loader/loader.conf": b"timeout 0\ndefault debian\n",
        "loader/entries/debian.conf": f"title Debian\nlinux /vmlinuz\ninitrd /initrd\noptions {_CMDLINE}\n".encode(),
        "syslinux.cfg": f"DEFAULT debian\nLABEL debian\nLINUX /vmlinuz\nINITRD /initrd\nAPPEND {_CMDLINE}\n".encode(),
        "vmlinuz": kernel.read_bytes(),
        "initrd": first.read_bytes(),
    }
    for path in (kernel, first, *top.glob("boot/System.map-*"), *top.glob("initrd.img*"), *top.glob("vmlinuz*")):
        path.unlink()
    return found


def _settle(top: Path) -> None:
    """What makes a file system of packages a machine."""
    (top / "etc/fstab").write_text(f"LABEL={ROOT_LABEL} / ext4 defaults,x-systemd.growfs 0 1\n")
    (top / "etc/hostname").write_text("debian\n")
    (top / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (top / "etc/machine-id").write_text("")
    repart = top / "etc/repart.d"
    repart.mkdir(exist_ok=True)
    (repart / "50-root.conf").write_text("[Partition]\nType=root\n")
    units = top / "etc/systemd/system"
    (units / seed.UNIT_NAME).write_text(seed.UNIT)
    _enable(units, "multi-user.target.wants", Path("..", seed.UNIT_NAME))
    _enable(units, "sysinit.target.wants", Path("/usr/lib/systemd/system/systemd-repart.service"))
    for name in _MASKED:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
    shadow = top / "etc/shadow"
    shadow.write_text(re.sub(r"^root:[^:]*:", "root::", shadow.read_text(), flags=re.MULTILINE))


def _enable(units: Path, target: str, unit: Path) -> None:
    wants = units / target
    wants.mkdir(parents=True, exist_ok=True)
    (wants / unit.name).unlink(missing_ok=True)
    (wants / unit.name).symlink_to(unit)


def _partition(disk: Path, root_mib: int) -> None:
    table = (
        "label: gpt\n"
        f"start=1MiB, size={BOOT_MIB}MiB, type=uefi, name=boot, attrs=LegacyBIOSBootable\n"
        f"start={1 + BOOT_MIB}MiB, size={root_mib}MiB, type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709, name=root\n"
    )
    done = subprocess.run(
        [str(_which("sfdisk")), "--quiet", "--no-reread", "--no-tell-kernel", str(disk)],
        input=table, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise PlatformError(f"sfdisk failed: {done.stderr.strip()[-300:]}")


def _put(disk: Path, data: bytes, offset: int) -> None:
    """What isn't zero, so that the file stays sparse."""
    with disk.open("r+b") as file:
        for at in range(0, len(data), 4096):
            part = data[at : at + 4096]
            if zlib.crc32(part) != zlib.crc32(bytes(len(part))):
                os.pwrite(file.fileno(), part, offset + at)


def _copy(source: Path, disk: Path, offset: int) -> None:
    with source.open("rb") as file, disk.open("r+b") as target:
        at, size = 0, os.fstat(file.fileno()).st_size
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole is left
                return
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            while start < at:
                start += os.pwrite(
                    target.fileno(), os.pread(file.fileno(), min(MIB, at - start), start), offset + start
                )


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _ran(program: str, *arguments: str) -> str:
    path = _which(program)
    if path is None:
        raise Unsupported(f"{program} is missing")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PlatformError(f"{Path(program).name} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
