"""The two programs of `dsec bench net`, as text: a server that runs outside and inside alike, and a client inside.

Owns nothing. Both need nothing but Python's standard library.
"""

SERVER = r"""
import os, socket, sys, threading
def serve(s):
    held = b""
    with s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            while b"\r\n\r\n" not in held:
                some = s.recv(65536)
                if not some:
                    return
                held += some
            head, _, held = held.partition(b"\r\n\r\n")
            size = int(head.split()[1].rpartition(b"/")[2] or 2)
            s.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            block = bytes(min(size, 1 << 20))
            while size > 0:
                size -= s.send(block[:size] if size < len(block) else block)
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=2048)
print(listener.getsockname()[1], flush=True)
threading.stack_size(128 << 10)
while True:
    connection, _ = listener.accept()
    threading.Thread(target=serve, args=(connection,), daemon=True).start()
"""

CLIENT = r"""
import json, socket, sys, time
def get(name, port, size=2):
    s = socket.create_connection((name, port))
    s.sendall(b"GET /%d HTTP/1.1\r\nHost: %s:%d\r\n\r\n" % (size, name.encode(), port))
    return s
def read(s):
    data = b""
    while b"\r\n\r\n" not in data or not data.partition(b"\r\n\r\n")[2]:
        some = s.recv(65536)
        if not some:
            raise SystemExit("cut short")
        data += some
def ready(port):
    for _ in range(1000):
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.02)
    raise SystemExit("the server inside doesn't listen")
def times(ways, count):
    found = [[] for _ in ways]
    for _ in range(count):
        for way, kept in zip(ways, found):
            began = time.perf_counter()
            with get(*way) as s:
                read(s)
            kept.append((time.perf_counter() - began) * 1e3)
    return [sorted(kept)[len(kept) // 2] for kept in found]
def stream(name, port, size):
    buffer = bytearray(1 << 20)
    with get(name, port, size) as s:
        got, began = 0, time.perf_counter()
        while got < size:
            some = s.recv_into(buffer)
            if not some:
                raise SystemExit("cut short")
            got += some
        return got / 1e6 / (time.perf_counter() - began)
def many(name, port, count):
    held, began = [], time.perf_counter()
    for _ in range(count):
        held.append(get(name, port))
    for s in held:
        read(s)
    for s in held:
        s.sendall(b"GET /2 HTTP/1.1\r\nHost: %s:%d\r\n\r\n" % (name.encode(), port))
    for s in held:
        read(s)
    return len(held), time.perf_counter() - began
what, *arguments = json.loads(sys.argv[1])
print(json.dumps(globals()[what](*arguments)))
"""
