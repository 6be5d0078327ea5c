"""A pool of cgroup slots, made in advance and used again.

`reserve` picks a slot without any I/O, so that it can be on record before anything is made; `take` hands the slot
out; `give_back` returns at once: a slot that is empty already, as is the rule, is cleaned there and then, any other by
a thread in the background (waking it for each would cost more than the cleaning). A slot that can't be emptied is
never handed out again: the thread goes on trying to remove it. A reservation is named `<slot>.<number>`, and a number
is never used again: whoever cancels or gives back twice can't touch the sandbox that has the slot by then. The pool
holds at most `spare` empty slots: memory cgroups cost the kernel memory even when idle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping

from dsec.kernel.cgroups import CgroupRoot, Shape, Slot

log = logging.getLogger(__name__)

WARM_MOST = 64
"""So many slots that serve may keep the descriptors of their files; a descriptor that was read costs 4 KiB."""
_RETRY_S = 1.0


def _slot_name(reservation: str) -> str:
    return reservation.partition(".")[0]


class CgroupPool:
    """Owns everything below the server's directories. `open` first, `close` last; the other calls are for the event
    loop."""

    def __init__(self, root: CgroupRoot, *, spare: int = 64, refill: int = 16) -> None:
        """`spare`: empty slots to keep; `refill`: how many to have ready of the shape that was asked for last."""
        self.root = root
        self._spare_most = spare
        self._refill = min(refill, spare)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._spare: dict[str, Slot] = {}
        self._reserved: dict[str, Slot] = {}
        self._taken: dict[str, Slot] = {}
        self._dirty: deque[Slot] = deque()
        self._stuck: deque[Slot] = deque()
        self._busy = False
        self._next = 0
        self._reservation = time.time_ns()
        self._retry_at = 0.0
        self._last: Shape | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    # opening and closing

    def open(self, known: Mapping[str, str] | None = None) -> dict[str, Slot]:
        """Begin. `known`: reservation -> the sandbox that has it on record. Those slots are adopted and returned by
        reservation; every other one is emptied (its processes end)."""
        self.root.prepare()
        adopted: dict[str, Slot] = {}
        owners = {(_slot_name(reservation), owner): reservation for reservation, owner in (known or {}).items()}
        for name in self.root.names():
            self._next = max(self._next, int(name[1:]) + 1)
            slot = Slot(self.root, name)
            whole = slot.load()
            reservation = owners.get((name, slot.note.owner)) if slot.note and slot.note.owner else None
            if whole and reservation is not None:
                adopted[reservation] = self._taken[name] = slot
            elif whole:
                self._dirty.append(slot)
            else:
                self._stuck.append(slot)
        self._thread = threading.Thread(target=self._maintain, name="dsec-cgroups", daemon=True)
        self._thread.start()
        return adopted

    def close(self, *, keep: bool = False) -> None:
        """Stop the thread. `keep`: leave the slots for the next server; else remove them all, which blocks until they
        are empty.

        Slots that are handed out are removed too.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        for slots in (self._taken.values(), self._spare.values(), self._reserved.values(), self._dirty, self._stuck):
            for slot in slots:
                slot.close()
        if keep:
            return
        for name in self.root.names():
            if not Slot(self.root, name).remove():
                log.error("cgroup %s cannot be removed: something in it does not end", name)
        self.root.remove()

    # handing out

    def reserve(self, shape: Shape) -> str:
        """Choose a slot: one of this shape, else any spare one, else one that `take` makes. Returns the reservation. No
        I/O."""
        with self._lock:
            self._last = shape
            slot = next(
                (slot for slot in reversed(self._spare.values()) if slot.note and slot.note.shape == shape), None
            )
            if slot is None and self._spare:
                slot = next(iter(self._spare.values()))
            if slot is None:
                slot = Slot(self.root, f"s{self._next}")
                self._next += 1
            else:
                del self._spare[slot.name]
            self._reservation += 1
            reservation = f"{slot.name}.{self._reservation}"
            self._reserved[reservation] = slot
            if len(self._spare) < self._refill or slot.note is None or slot.note.shape != shape:
                self._wake.notify()
            return reservation

    def take(self, reservation: str, shape: Shape, owner: str, uid: int) -> Slot:
        """The reserved slot, made or reshaped where it has to be, for the sandbox `owner` whose inside root is `uid`.

        Raises KernelError; the slot is then removed. LookupError for a reservation that isn't there.
        """
        with self._lock:
            slot = self._reserved.pop(reservation)
            self._taken[slot.name] = slot
        try:
            if slot.note is None:
                slot.make(shape)
            elif slot.note.shape != shape:
                slot.reshape(shape)
            slot.assign(owner, uid)
            if len(self._taken) > WARM_MOST:
                slot.close()
        except OSError:
            slot.close()
            with self._wake:
                del self._taken[slot.name]
                self._stuck.append(slot)  # half its limits may be the old ones: it goes
                self._wake.notify()
            raise
        return slot

    def find(self, reservation: str, owner: str) -> Slot | None:
        """The slot that was taken, if it still serves that sandbox: it may serve another one by now."""
        slot = self._taken.get(_slot_name(reservation))
        return slot if slot and slot.note and slot.note.owner == owner else None

    def cancel(self, reservation: str) -> None:
        """Undo a `reserve` that no `take` followed. Idempotent."""
        with self._wake:
            slot = self._reserved.pop(reservation, None)
            if slot is not None and slot.note is not None:  # else nothing was made
                self._spare[slot.name] = slot
                self._wake.notify()

    def give_back(self, slot: Slot) -> None:
        """End what runs in the slot and take it back. Returns at once. Idempotent.

        Whoever puts processes into slots must be done with this one: a process that is attached later is in the next
        sandbox's slot.
        """
        if self._taken.get(slot.name) is not slot:
            return
        del self._taken[slot.name]
        clean = slot.clean_at_once()
        with self._wake:
            if clean and len(self._spare) < self._spare_most:
                self._spare[slot.name] = slot
                return
            slot.kill()
            slot.close()
            self._dirty.append(slot)
            self._wake.notify()

    # background

    def counts(self) -> dict[str, int]:
        """How many slots are spare, reserved, being emptied, and stuck."""
        with self._lock:
            return {
                "spare": len(self._spare),
                "reserved": len(self._reserved),
                "dirty": len(self._dirty) + self._busy,
                "stuck": len(self._stuck),
            }

    def _maintain(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._dirty or self._short() or self._retry_due()):
                    self._wake.wait(_RETRY_S if self._stuck else None)
                if self._stopping:
                    return
                slot = self._dirty.popleft() if self._dirty else None
                broken = None
                if slot is None and self._retry_due():
                    broken = self._stuck.popleft()
                    self._retry_at = time.monotonic() + _RETRY_S
                shape = self._last
                self._busy = slot is not None or broken is not None
            try:
                if slot is not None:
                    self._recycle(slot)
                elif broken is not None:
                    self._discard(broken)
                elif shape is not None:
                    self._add(shape)
            except OSError:
                log.exception("cgroup maintenance failed")
                with self._wake:
                    self._stuck.extend(each for each in (slot, broken) if each is not None)
                    if not self._stopping:
                        self._wake.wait(_RETRY_S)
            finally:
                self._busy = False

    def _retry_due(self) -> bool:
        return bool(self._stuck) and time.monotonic() >= self._retry_at

    def _short(self) -> bool:
        if self._last is None or len(self._spare) >= self._spare_most:
            return False
        fitting = sum(1 for slot in self._spare.values() if slot.note and slot.note.shape == self._last)
        return fitting < self._refill

    def _recycle(self, slot: Slot) -> None:
        if not slot.clean(timeout_s=1.0):
            with self._lock:
                self._stuck.append(slot)
            return
        self._keep_or_discard(slot)

    def _keep_or_discard(self, slot: Slot) -> None:
        with self._lock:  # while it was being made or cleaned, others may have come back
            keep = len(self._spare) < self._spare_most
            if keep:
                self._spare[slot.name] = slot
        if not keep:
            self._discard(slot)

    def _discard(self, slot: Slot) -> None:
        if not slot.remove(timeout_s=0.5):
            with self._lock:
                self._stuck.append(slot)

    def _add(self, shape: Shape) -> None:
        with self._lock:
            name = f"s{self._next}"
            self._next += 1
        slot = Slot(self.root, name)
        try:
            slot.make(shape)
        except OSError:
            with self._lock:
                self._stuck.append(slot)
                self._last = None  # until somebody asks again
            raise
        finally:
            slot.close()
        self._keep_or_discard(slot)
