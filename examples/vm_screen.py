"""A desktop in a full machine, used as a person uses one, by screen, mouse and keyboard: makes docs/vm-screen.png.

Once, for a disk with a small X (about two minutes): `dsec disk build desktop --package xserver-xorg-core --package
xserver-xorg-video-fbdev --package xserver-xorg-input-evdev --package x11-apps --package xterm --package xfonts-base`.
Then `python examples/vm_screen.py FILE.png`.
"""

import sys
import time
from pathlib import Path

import dsec

PROGRAMS = ("xcalc -geometry 300x400+80+80", "xeyes -geometry 200x140+500+90", "xterm -geometry 60x14+440+300")
KEYS = {"6": (288, 401), "*": (346, 370), "7": (171, 370), "=": (346, 461)}
"""Where the calculator has them."""
TERMINAL = (620, 400)


def main(target: Path) -> None:
    with dsec.Sandbox.create(
        "desktop", backend="vm", memory_bytes=768 << 20, disk_bytes=3 << 30, request_timeout_s=600
    ) as vm:
        vm.commands.start("exec Xorg :0 vt7 -nolisten tcp")
        vm.commands.run("until [ -S /tmp/.X11-unix/X0 ]; do sleep 0.5; done").check()
        vm.commands.run("until grep -q 'type: KEYBOARD' /var/log/Xorg.0.log; do sleep 0.5; done").check()
        for program in PROGRAMS:
            vm.commands.start(f"exec {program}", env={"DISPLAY": ":0"})
        seen = settled(vm, b"", 10)
        for key in "6*7=":
            vm.click(*KEYS[key])
        seen = settled(vm, seen)
        vm.click(*TERMINAL)
        vm.type("uname -sr; uptime -p; echo six times seven, by clicks\n")
        target.write_bytes(settled(vm, seen))
    print(f"the screen is in {target}")


def settled(vm: dsec.Sandbox, seen: bytes, quiet_s: float = 5) -> bytes:
    """The screen once it is another than `seen` and hasn't changed for so long (two minutes at most)."""
    now, since, begun = seen, time.monotonic(), time.monotonic()
    while (now == seen or time.monotonic() - since < quiet_s) and time.monotonic() - begun < 120:
        before, now = now, vm.screenshot()
        if now != before:
            since = time.monotonic()
        time.sleep(0.5)
    return now


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "screen.png"))
