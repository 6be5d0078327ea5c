"""The seed of a full machine: a small read-only disk by which it finds its guest, and cloud-init its first orders.

A FAT file system with the label `CIDATA`, as cloud-init's NoCloud source wants it: `meta-data`, `user-data`, the
compiled guest (`dsec-guest`), its unit for systemd and `dsec-install`, a shell script that starts it. A disk with
cloud-init runs the script by `user-data`; one that `dsec disk build` made has the unit already. The guest is not in the
disk's image, so that it is always this server's.
"""

from __future__ import annotations

import json

from dsec.vmm import fat

LABEL = "CIDATA"
PLACE = "/run/dsec"
"""Where it is mounted in the machine."""
UNIT_NAME = "dsec-guest.service"
UNIT = f"""\
[Unit]
Description=dsec guest
DefaultDependencies=no
After=multi-user.target
Conflicts=shutdown.target
Before=shutdown.target
FailureAction=poweroff-immediate
ConditionPathExists=/dev/disk/by-label/{LABEL}

[Service]
ExecCondition=/bin/sh -c 'mkdir -p {PLACE} && mount -r /dev/disk/by-label/{LABEL} {PLACE} && [ -x {PLACE}/dsec-guest ]'
ExecStart={PLACE}/dsec-guest --service
KillMode=process
TasksMax=infinity
LimitNOFILE=1048576

[Install]
WantedBy=multi-user.target
"""
"""After all else that is started at boot: what a template is saved with has settled. A machine whose guest was killed
is reached by nobody any more, and ends; one that was given none, as its seed says, has no service."""
_INSTALL = f"""\
#!/bin/sh
set -e
cp "$(dirname "$0")/{UNIT_NAME}" /etc/systemd/system/{UNIT_NAME}
systemctl daemon-reload
systemctl enable {UNIT_NAME}
systemctl start --no-block {UNIT_NAME}
"""


def make(guest: bytes | None, user_data: str = "") -> bytes:
    """The disk. `guest`: the program (None: the machine gets none). `user_data`: for cloud-init, instead of ours."""
    files: dict[str, bytes] = {
        "meta-data": json.dumps({"instance-id": "dsec", "local-hostname": "dsec"}).encode() + b"\n",
        "user-data": (user_data or _user_data(guest is not None)).encode(),
    }
    if guest is not None:
        files |= {"dsec-guest": guest, UNIT_NAME: UNIT.encode(), "dsec-install": _INSTALL.encode()}
    return fat.make(files, LABEL)


def _user_data(guest: bool) -> str:
    orders: dict[str, object] = {"ssh_deletekeys": False}
    if guest:
        at = "/run/dsec-install"
        run = f"mkdir -p {at} && mount -r /dev/disk/by-label/{LABEL} {at} && sh {at}/dsec-install; umount {at}"
        orders["runcmd"] = [["sh", "-c", run]]
    return f"#cloud-config\n{json.dumps(orders)}\n"
