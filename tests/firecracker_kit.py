"""A program that plays Firecracker: its API as published (1.7 to 1.17), each request checked, and a guest that says
what ours would until it is somebody. Run as `firecracker` itself, by any Python 3.11 without packages.

It opens what it is told to open, by path, as the user that it is; it writes and reads snapshots, and has a clone's
memory served by userfaultfd where it is told so. What it was asked it writes to its output, a line of JSON each.
"""

import array
import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import re
import socket
import struct
import sys
import threading

# --- the API: (type, needed, which values are good) of each field ----------------------------------------------------

BUCKET = {"size": (int, True, None), "refill_time": (int, True, None), "one_time_burst": (int, False, None)}
LIMITER = {"bandwidth": (BUCKET, False, None), "ops": (BUCKET, False, None)}
BACKEND = {"backend_type": (str, True, {"File", "Uffd"}), "backend_path": (str, True, None)}
DRIVE = {
    "drive_id": (str, True, re.compile(r"[A-Za-z0-9_]+").fullmatch),
    "is_root_device": (bool, True, None),
    "partuuid": (str, False, None),
    "cache_type": (str, False, {"Unsafe", "Writeback"}),
    "is_read_only": (bool, True, None),
    "path_on_host": (str, True, None),
    "rate_limiter": (LIMITER, False, None),
    "io_engine": (str, False, {"Sync", "Async"}),
}
BALLOON = {
    "amount_mib": (int, True, lambda size: size >= 0),
    "deflate_on_oom": (bool, True, None),
    "stats_polling_interval_s": (int, False, lambda seconds: 0 <= seconds < 1 << 16),
}
BALLOON_REPORTING = {"free_page_hinting": (bool, False, None), "free_page_reporting": (bool, False, None)}
BEFORE, RUNS, PAUSED = "Not started", "Running", "Paused"


def api(version):
    """(method, path): (fields, states in which it is legal)."""
    balloon = BALLOON | (BALLOON_REPORTING if version >= (1, 14) else {})
    machine = {
        "vcpu_count": (int, True, lambda count: 1 <= count <= 32),
        "mem_size_mib": (int, True, lambda size: size > 0),
        "smt": (bool, False, None),
        "track_dirty_pages": (bool, False, None),
        "cpu_template": (str, False, {"C3", "T2", "T2S", "T2CL", "T2A", "V1N1", "None"}),
        "huge_pages": (str, False, {"None", "2M"}),
    }
    source = {
        "kernel_image_path": (str, True, None),
        "initrd_path": (str, False, None),
        "boot_args": (str, False, None),
    }
    vsock = {
        "guest_cid": (int, True, lambda cid: cid >= 3),
        "uds_path": (str, True, None),
        "vsock_id": (str, False, None),
    }
    load = {
        "snapshot_path": (str, True, None),
        "mem_backend": (BACKEND, True, None),
        "resume_vm": (bool, False, None),
        "track_dirty_pages": (bool, False, None),
        "enable_diff_snapshots": (bool, False, None),
    }
    create = {
        "snapshot_path": (str, True, None),
        "mem_file_path": (str, True, None),
        "snapshot_type": (str, False, {"Full", "Diff"}),
    }
    actions = {"FlushMetrics", "InstanceStart", "SendCtrlAltDel"}
    return {
        ("GET", "/"): ({}, {BEFORE, RUNS, PAUSED}),
        ("PUT", "/machine-config"): (machine, {BEFORE}),
        ("PUT", "/boot-source"): (source, {BEFORE}),
        ("PUT", "/drives/{drive_id}"): (DRIVE, {BEFORE}),
        ("PUT", "/vsock"): (vsock, {BEFORE}),
        ("PUT", "/entropy"): ({"rate_limiter": (LIMITER, False, None)}, {BEFORE}),
        ("PUT", "/balloon"): (balloon, {BEFORE}),
        ("PATCH", "/balloon"): ({"amount_mib": (int, True, lambda size: size >= 0)}, {RUNS, PAUSED}),
        ("PUT", "/actions"): ({"action_type": (str, True, actions)}, {BEFORE, RUNS}),
        ("PATCH", "/vm"): ({"state": (str, True, {"Paused", "Resumed"})}, {RUNS, PAUSED}),
        ("PUT", "/snapshot/create"): (create, {PAUSED}),
        ("PUT", "/snapshot/load"): (load, {BEFORE}),
    }


def check(fields, body, where=""):
    """Raises ValueError with what is wrong."""
    if not isinstance(body, dict):
        raise ValueError(f"{where or 'the body'} is no object")
    for name in body.keys() - fields.keys():
        raise ValueError(f"unknown field `{where}{name}`")
    for name, (kind, needed, good) in fields.items():
        if name not in body:
            if needed:
                raise ValueError(f"missing field `{where}{name}`")
            continue
        value = body[name]
        if isinstance(kind, dict):
            check(kind, value, f"{where}{name}.")
        elif type(value) is not kind:
            raise ValueError(f"`{where}{name}` is {value!r}, and no {kind.__name__}")
        elif good is not None and not (value in good if isinstance(good, set) else good(value)):
            raise ValueError(f"`{where}{name}` can't be {value!r}")


# --- the machine -----------------------------------------------------------------------------------------------------

READY, CONFIGURED, WELCOME, SYNCED, REFUSED, PONG = 74, 75, 66 - 1, 67, 72, 73
HELLO, START, CONFIGURE, WARM, PING = 1, 2, 10, 11, 7
PATTERN = b"a page of the template's memory "
STATE = b"a microVM's state"


class Machine:
    """One, and its API."""

    def __init__(self, version=(1, 17)):
        self.table = api(version)
        self.state = BEFORE
        self.has = {}
        self.configured = self.clone = False
        self.highest = 0
        self.listening = None
        self.connections = []

    def request(self, method, path, body):
        """The status and the answer's content."""
        name = re.sub(r"^/drives/.*", "/drives/{drive_id}", path)
        try:
            if (method, name) not in self.table:
                raise ValueError(f"no such call: {method} {path}")
            fields, states = self.table[method, name]
            check(fields, body or {})
            if self.state not in states:
                raise ValueError(f"{method} {path} is not legal while {self.state}")
            return self.act(method, path, body)
        except (ValueError, OSError) as error:
            return 400, {"fault_message": str(error)}

    def act(self, method, path, body):
        if (method, path) == ("GET", "/"):
            return 200, {"app_name": "Firecracker", "id": "anonymous", "state": self.state, "vmm_version": "0"}
        if path == "/actions":
            self.start(body["action_type"])
        elif path == "/vm":
            self.set_state(PAUSED if body["state"] == "Paused" else RUNS)
        elif path == "/snapshot/create":
            self.create(body)
        elif path == "/snapshot/load":
            self.load(body)
        else:
            self.configure(path, body)
        return 204, None

    def configure(self, path, body):
        if path.startswith("/drives/"):
            if body["drive_id"] != path.removeprefix("/drives/"):
                raise ValueError("the drive's id is another in the path")
            os.close(os.open(body["path_on_host"], os.O_RDONLY if body["is_read_only"] else os.O_RDWR))
        if path == "/boot-source":
            for field in ("kernel_image_path", "initrd_path"):
                if field in body:
                    with open(body[field], "rb") as file:
                        head = file.read(4)
                    if field == "kernel_image_path" and head != b"\x7fELF":
                        raise ValueError("the kernel is no ELF image")
        self.has[path] = body

    def start(self, action):
        if action != "InstanceStart" or self.state != BEFORE:
            raise ValueError(f"{action} is not legal while {self.state}")
        if "/boot-source" not in self.has:
            raise ValueError("there is no boot source")
        self.open_vsock()
        self.set_state(RUNS)

    def set_state(self, state):
        self.state = state

    def open_vsock(self):
        if "/vsock" in self.has:
            self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listening.bind(self.has["/vsock"]["uds_path"])
            self.listening.listen(8)
            threading.Thread(target=self.serve_vsock, daemon=True).start()

    def create(self, body):
        connections, self.connections = self.connections, []
        for connection in connections:  # the device tells the guest that they are over
            connection.shutdown(socket.SHUT_RDWR)
        size = self.has["/machine-config"]["mem_size_mib"] << 20
        with open(body["mem_file_path"], "r+b") as memory:
            memory.write(bytes(size))  # zeros too, as the real one
            for at in range(0, size, 16 << 20):
                os.pwrite(memory.fileno(), PATTERN * 128, at)
        with open(body["snapshot_path"], "wb") as file:
            file.write(STATE + json.dumps([self.has, self.configured, self.highest]).encode())

    def load(self, body):
        if self.has:
            raise ValueError("a snapshot is loaded by a fresh process alone")
        with open(body["snapshot_path"], "rb") as file:
            state = file.read()
        if not state.startswith(STATE):
            raise ValueError("this is no state")
        self.has, self.configured, self.highest = json.loads(state[len(STATE) :])
        for path, each in self.has.items():
            if path.startswith("/drives/"):
                self.configure(path, each)
        size = self.has["/machine-config"]["mem_size_mib"] << 20
        backend = body["mem_backend"]
        if backend["backend_type"] == "File":
            fd = os.open(backend["backend_path"], os.O_RDONLY)
            memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        else:
            memory = served(backend["backend_path"], size)
        self.look(memory, size)
        self.clone = True
        self.open_vsock()
        self.state = PAUSED
        if body.get("resume_vm"):
            self.state = RUNS

    @staticmethod
    def look(memory, size):
        for at in range(0, size, 16 << 20):
            if memory[at : at + 4096] != PATTERN * 128 or any(memory[at + 8192 : at + 12288]):
                raise ValueError(f"the memory is another at {at}")
        memory[4096:4100] = b"mine"

    # --- its guest

    def serve_vsock(self):
        while True:
            connection, _ = self.listening.accept()
            line = b""
            while not line.endswith(b"\n"):
                line += connection.recv(1) or b"\n"
            if line != b"CONNECT 1024\n" or self.state != RUNS:
                connection.close()
                continue
            connection.sendall(b"OK 1073741824\n")
            self.connections.append(connection)
            threading.Thread(target=self.guest, args=(connection,), daemon=True).start()

    def guest(self, connection):
        with contextlib.suppress(OSError, EOFError):
            self.speak(connection)

    def speak(self, connection):
        def take(size):
            data = b""
            while len(data) < size:
                got = connection.recv(size - len(data))
                if not got:
                    raise EOFError
                data += got
            return data

        def put(kind, payload=b"", op=0):
            connection.sendall(struct.pack("<IBBHQ", len(payload), kind, 0, 0, op) + payload)

        if not self.clone:
            put(READY, struct.pack("<Q", 10**9))
        if self.configured:
            take(16)  # the token
        while True:
            size, kind, _, _, op = struct.unpack("<IBBHQ", take(16))
            payload = take(size)
            if kind == WARM:
                put(READY, struct.pack("<Q", 10**9))
            elif kind == CONFIGURE:
                self.configured = True
                put(CONFIGURED, struct.pack("<Q", 10**6), op)
                take(16)
            elif kind == HELLO:
                put(WELCOME, payload[:4] + struct.pack("<I", 0) + payload[8:16] + struct.pack("<Q", self.highest))
                put(SYNCED)
            elif kind == PING:
                put(PONG, payload + struct.pack("<Q", 1))
            elif kind == START and b"reboot" in payload:
                say("Kernel panic - not syncing: played")
                os._exit(0)
            elif kind == START:
                self.highest = max(self.highest, op)
                put(REFUSED, struct.pack("<II", 1, 0) + b"nothing runs here", op)


def served(path, size):
    """Memory whose pages come from whoever listens at `path`."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    device = os.open("/dev/userfaultfd", os.O_RDWR)
    uffd = fcntl.ioctl(device, 0xAA00, os.O_CLOEXEC | os.O_NONBLOCK)
    asked = bytearray(struct.pack("<QQQ", 0xAA, 1 << 3, 0))  # UFFD_FEATURE_EVENT_REMOVE
    fcntl.ioctl(uffd, 0xC018AA3F, asked)
    fcntl.ioctl(uffd, 0xC020AA00, bytearray(struct.pack("<QQQQ", address, size, 1, 0)))
    regions = [{"base_host_virt_addr": address, "size": size, "offset": 0, "page_size": 4096, "page_size_kib": 4096}]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [uffd]))]
    connection.sendmsg([json.dumps(regions).encode()], rights)
    first = memory[0:32]
    # The balloon gives a page back: from now on it is zeros, and no page of the template's.
    if first != PATTERN or libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(4096), 4):
        raise ValueError(f"the first page is {first!r}")
    if any(memory[0:4096]):
        raise ValueError("a page that was given back is not empty")
    memory[0:4096] = PATTERN * 128
    return memory


# --- HTTP ------------------------------------------------------------------------------------------------------------


def serve(machine, listening, record):
    """The API, one connection after another."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # closed
            return
        with connection, connection.makefile("rwb") as stream:
            while line := stream.readline():
                method, path, _ = line.decode().split()
                size = 0
                while (header := stream.readline().decode().strip()) != "":
                    name, _, value = header.partition(":")
                    size = int(value) if name.lower() == "content-length" else size
                content = stream.read(size)
                body = json.loads(content) if content else None
                status, answer = machine.request(method, path, body)
                record({"method": method, "path": path, "body": body, "status": status})
                data = json.dumps(answer).encode() if answer is not None else b""
                head = f"HTTP/1.1 {status} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n" if data else ""
                stream.write(head.encode() + b"\r\n" + data)
                stream.flush()


def say(text):
    """On its output, which the launcher keeps the end of."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main():
    words = iter(sys.argv[1:])
    path = None
    for word in words:
        if word == "--version":
            say("Firecracker v1.17.0")
            return
        if word == "--api-sock":
            path = next(words)
        elif word in ("--id", "--level", "--log-path"):
            next(words)
        elif word != "--no-seccomp":
            sys.exit(f"what is {word}?")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen(1)
    serve(Machine(), listening, lambda said: say(json.dumps(said)))


if __name__ == "__main__":
    main()
