# type: ignore
"""The warm parent: runs in a function environment's jail, in the environment's own Python, and forks a worker a call.

It is given as text to `python3 -c`, so it imports nothing of ours and works from Python 3.8 on. What a call costs
before its code runs is in C (native/warm), because every object that is touched here is a page to copy. Nothing outside
believes it more than that a worker ended: whatever is imported here may be hostile. Invariants: a worker keeps no
descriptor of the parent's but the three of its call, holds no capability, and begins with what was imported, not with
what an earlier call left.
"""

import ctypes
import gc
import importlib
import linecache
import marshal
import os
import struct
import sys
import traceback
import types

PARENT, WARM, CALL = 3, 4, 3
UP = 69
MESSAGE = struct.Struct("<IIIi")
MAX_TEXT = 60000
MAX_DEPTH = 200
OURS = sys._getframe().f_code.co_filename
WITHHELD = []
"""What `threading` and `random` want to run in each child: half of a fork's cost."""
TO_RUN = []
"""What has to run in each worker all the same."""


class Refused(Exception):
    """What can't be sent back."""


# --- values ---------------------------------------------------------------------------------------------------------


def head(out, size, small, small_most, codes):
    """The head of something with a length: in the code, or behind it in one, two or four bytes."""
    if size <= small_most:
        out.append(small | size)
    elif codes[0] and size < 256:
        out += struct.pack(">BB", codes[0], size)
    elif size < 65536:
        out += struct.pack(">BH", codes[1], size)
    elif size < 1 << 32:
        out += struct.pack(">BI", codes[2], size)
    else:
        raise Refused("more than 4 GiB")


def pack_int(value, out):
    if 0 <= value < 128:
        out.append(value)
    elif -32 <= value < 0:
        out.append(256 + value)
    elif -(1 << 63) <= value < 1 << 63:
        out += struct.pack(">Bq", 0xD3, value)
    elif 0 <= value < 1 << 64:
        out += struct.pack(">BQ", 0xCF, value)
    else:
        raise Refused("an int beyond 64 bits")


def pack(value, out, limit, depth=0):
    """msgpack of a value. Raises `Refused` for what is none, for cycles, and beyond `limit` bytes."""
    if depth > MAX_DEPTH:
        raise Refused(f"it is deeper than {MAX_DEPTH} levels, or holds itself")
    kind = type(value)
    if value is None:
        out.append(0xC0)
    elif kind is bool:
        out.append(0xC3 if value else 0xC2)
    elif kind is int:
        pack_int(value, out)
    elif kind is float:
        out += struct.pack(">Bd", 0xCB, value)
    elif kind is str:
        if len(value) > limit:
            raise Refused(f"more than {limit} bytes")
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise Refused(
                "text with half of a surrogate pair, as os.listdir has it for names that aren't UTF-8"
            ) from None
        head(out, len(data), 0xA0, 31, (0xD9, 0xDA, 0xDB))
        out += data
    elif kind in (bytes, bytearray, memoryview):
        if len(value) > limit:
            raise Refused(f"more than {limit} bytes")
        data = bytes(value)
        head(out, len(data), 0, -1, (0xC4, 0xC5, 0xC6))
        out += data
    elif kind in (list, tuple):
        head(out, len(value), 0x90, 15, (0, 0xDC, 0xDD))
        for each in value:
            pack(each, out, limit, depth + 1)
    elif kind is dict:
        head(out, len(value), 0x80, 15, (0, 0xDE, 0xDF))
        for key, each in value.items():
            if type(key) not in (str, int):
                raise Refused(f"a dict with a key of type {type(key).__name__}")
            pack(key, out, limit, depth + 1)
            pack(each, out, limit, depth + 1)
    elif kind.__module__ == "numpy" and hasattr(value, "tolist"):
        if getattr(value, "nbytes", 0) > limit:
            raise Refused(f"more than {limit} bytes")
        pack(value.tolist(), out, limit, depth + 1)
    else:
        for plain in (int, float, str, bytes, list, dict, tuple):  # of a class of their own
            if isinstance(value, plain):
                pack(plain(value), out, limit, depth + 1)
                break
        else:
            raise Refused(f"a value of type {kind.__module__}.{kind.__qualname__}")
    if len(out) > limit:
        raise Refused(f"more than {limit} bytes")


# --- a worker -------------------------------------------------------------------------------------------------------


def leave(code):
    """End, once the host has the answer and closes the call: it was often woken on this processor, and a process's end
    takes longer than most calls do."""
    os.read(CALL, 1)
    os._exit(code)


def serve_call(end=leave):
    """Wait for the call, run it, answer it. Does not return."""
    os.chdir("/tmp")
    for hook in TO_RUN:
        hook()
    for hook in WITHHELD:  # for what a call forks
        os.register_at_fork(after_in_child=hook)
    size = struct.unpack("<I", receive(4))[0]
    call = marshal.loads(receive(size))
    if call["compile"]:
        answer(compiled(call), end)
    if call["env"]:
        os.environ.update(call["env"])
    refused = furnish(call) if call["files"] or call["stdin"] else None
    if refused and call["name"]:
        answer(failure(type(refused).__qualname__, f"its files can't be put there: {refused}", ""), end)
    elif refused:
        sys.stderr.write(f"its files can't be put there: {refused}\n")
        sys.stderr.flush()
        os._exit(126)
    elif call["name"] == "":
        run_program(call)
    else:
        packed = run_function(call)
        for stream in (sys.stdout, sys.stderr):
            flush(stream)
        answer(packed, end)


def flush(stream):
    """Whether it went well: it may be closed, or replaced by anything."""
    try:
        stream.flush()
    except BaseException:
        return False
    return True


def furnish(call):
    """Its files and its stdin. The error where there is no room for them."""
    try:
        for name, content in call["files"].items():
            if os.path.dirname(name):
                os.makedirs(os.path.dirname(name), exist_ok=True)
            with open(name, "wb") as file:
                file.write(content)
        if call["stdin"]:
            stdin = os.memfd_create("stdin")
            with open(stdin, "wb", closefd=False) as file:
                file.write(call["stdin"])
            os.lseek(stdin, 0, os.SEEK_SET)
            os.dup2(stdin, 0)
            os.close(stdin)
    except OSError as error:
        return error
    return None


def answer(packed, end):
    """Does not return."""
    data = memoryview(struct.pack("<I", len(packed)) + packed)
    while data:
        data = data[os.write(CALL, data) :]
    end(0)


def compiled(call):
    """For later calls: none of its code has run in this process, so nobody can have had a hand in it."""
    packed = bytearray()
    try:
        pack({"value": marshal.dumps(code_of(call))}, packed, call["limit"])
    except BaseException as error:  # a call of it will say so itself
        return failure(type(error).__qualname__, "", "")
    return packed


def code_of(call):
    file = f"<{call['name']}>" if call["name"] else "main.py"
    source = call["source"]
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    return marshal.loads(call["code"]) if call["code"] else compile(source, file, "exec")


def receive(size):
    data = bytearray()
    while len(data) < size:
        part = os.read(CALL, min(size - len(data), 1 << 20))
        if not part:
            os._exit(0)  # nobody wants anything
        data += part
    return data


def run_function(call):
    """The answer, packed."""
    limit = call["limit"]
    try:
        value = find(call)(*call["args"], **call["kwargs"])
        if isinstance(value, types.CoroutineType):
            value = importlib.import_module("asyncio").run(value)
        packed = bytearray()
        pack({"value": value, "files": taken(call["take"])}, packed, limit)
        return packed
    except Refused as error:
        return failure("ResultRefused", f"the result can't be sent back: {error}", "")
    except BaseException as error:
        return failure(type(error).__qualname__, text_of(error), traceback_of(error))


def find(call):
    source, name = call["source"], call["name"]
    if source:
        found = types.ModuleType("__function__")
        sys.modules["__function__"] = found
        exec(code_of(call), found.__dict__)
    else:
        module, _, name = name.partition(":")
        found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def failure(kind, message, trace):
    said = {"type": kind[:200], "message": message[:MAX_TEXT], "traceback": trace[-MAX_TEXT:]}
    said = {name: text.encode("utf-8", "replace").decode() for name, text in said.items()}
    packed = bytearray()
    pack({"error": said}, packed, 1 << 20)
    return packed


def text_of(error):
    try:
        return str(error)
    except BaseException:
        return "(its text can't be made)"


def traceback_of(error):
    """Without our own frames."""
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == OURS:
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException:
        return ""


def taken(names):
    files = {}
    for name in names:
        try:
            with open(name, "rb") as file:
                files[name] = file.read()
        except OSError:
            pass
    return files


def run_program(call):
    """As `python3 main.py` would, up to its exit code. Does not return."""
    main = types.ModuleType("__main__")
    main.__file__ = "/tmp/main.py"
    sys.modules["__main__"] = main
    sys.argv = ["main.py"]
    code = 0
    try:
        exec(code_of(call), main.__dict__)
    except SystemExit as error:
        code = exit_code(error)
    except BaseException as error:
        sys.stderr.write(traceback_of(error))
        code = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        importlib.import_module("atexit")._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120
    os._exit(code)


def exit_code(error):
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 255
    sys.stderr.write(f"{error.code}\n")
    return 1


# --- the parent -----------------------------------------------------------------------------------------------------


def import_all(names):
    """Why it can't serve, or ""."""
    register = os.register_at_fork
    os.register_at_fork = withholding(register)
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"import {name}: {traceback_of(error)[-8000:]}"
    os.register_at_fork = register
    with open("/proc/self/maps") as maps:
        for line in maps:
            parts = line.split(None, 5)
            if parts[1][1] == "w" and parts[1][3] == "s":
                return f"an import maps memory that all calls would share: {parts[-1].strip()}"
    return ""


def withholding(register):
    def register_at_fork(**hooks):
        if sys._getframe(1).f_globals.get("__name__") in ("threading", "random"):
            WITHHELD.append(hooks["after_in_child"])
        else:
            register(**hooks)

    return register_at_fork


def settle_hooks(warm):
    """Decide what of the withheld must run in each worker: nothing, where this is the only thread, and where the native
    part can give the random generators states of their own."""
    if "threading" in sys.modules and len(os.listdir("/proc/self/task")) > 1:
        TO_RUN.append(sys.modules["threading"]._after_fork)
    for name, place_of in (("random", state_of_random), ("numpy.random", state_of_numpy)):
        module = sys.modules.get(name)
        if module is None:
            continue
        try:
            words, index, expected = place_of(module)
            first = min(words, index)
            known = ctypes.string_at(first, len(expected)) == expected and warm.warm_generator(words, index)
        except Exception:  # of another version, or somebody else's of that name
            known = False
        if not known and hasattr(module, "seed"):
            TO_RUN.append(module.seed)


def state_of_random(random):
    """Where its Mersenne Twister has its words, where their index, and what is there from the first of both on."""
    random.seed()
    state, address = random.getstate()[1], id(random._inst) + object.__basicsize__
    expected = struct.pack("=i624I", state[-1], *state[:-1])
    if type(random._inst).__basicsize__ < object.__basicsize__ + len(expected):
        raise TypeError("another layout")
    return address + 4, address, expected


def state_of_numpy(numpy):
    numpy.seed(int.from_bytes(os.urandom(4), "little"))
    kind, words, index = numpy.get_state()[:3]
    if kind != "MT19937":
        raise TypeError("another generator")
    address = numpy.mtrand._rand._bit_generator.ctypes.state_address
    return address, address + 2496, words.tobytes() + struct.pack("=i", index)


def shed(warm):
    """Let the native part move what the imports have written to where a fork doesn't copy its tables: the heap, the
    data of programs and libraries, Python's arenas."""
    if len(os.listdir("/proc/self/task")) > 1 or "LD_PRELOAD" in os.environ:  # or somebody else's heap
        return
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    for line in lines:
        place, kind, _, _, inode, *name = line.split()
        if kind in ("rw-p", "r--p") and (inode != "0" or name == ["[heap]"]):
            warm.warm_shed(*(int(word, 16) for word in place.split("-")), 3 if kind[1] == "w" else 1)
    warm.warm_shed_arenas()


def rehearse(warm):
    """Let the native part see which pages a call needs."""
    pair = (ctypes.c_int * 2)()
    if ctypes.CDLL(None).socketpair(1, 1, 0, pair):  # AF_UNIX, SOCK_STREAM
        return
    source = "def f(x):\n    return x\n"
    call = {
        "source": source,
        "name": "f",
        "args": [1],
        "kwargs": {},
        "code": marshal.dumps(compile(source, "", "exec")),
    }
    call.update(stdin=b"", files={}, take=[], env={}, limit=1 << 20, compile=False)
    body = marshal.dumps(call, 2)
    os.write(pair[0], struct.pack("<I", len(body)) + body)
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, kind, _, _, inode = line.split(None, 5)[:5]
            if kind == "rw-p" or (kind in ("r-xp", "r--p") and inode != "0"):
                warm.warm_mapping(*(int(word, 16) for word in place.split("-")), kind[1] == "w")
    if warm.warm_rehearse(*pair):
        try:
            serve_call(lambda _: warm.warm_tell())
        finally:
            os._exit(1)


def main():
    warm = ctypes.PyDLL(f"/proc/self/fd/{WARM}")
    os.close(WARM)
    ctypes.CDLL(None).prctl(15, b"dsec-warm", 0, 0, 0)
    warm.warm_arenas()
    warm.warm_generator.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    failed = import_all(sys.argv[1:])
    if not failed:
        settle_hooks(warm)
    warm.warm_mapping.argtypes = warm.warm_shed.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
    gc.collect()
    gc.freeze()
    if not failed:
        shed(warm)
        rehearse(warm)
    os.write(PARENT, MESSAGE.pack(UP, 0, 0, 0) + failed.encode("utf-8", "replace"))
    if failed:
        return
    if warm.warm_serve():
        try:
            serve_call()
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
