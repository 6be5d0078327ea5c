"""Files, by E2B's client."""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
import urllib.error
import urllib.request

from case_kit import PATIENCE_S, raises, run

from e2b import (
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotEnoughSpaceException,
    SandboxException,
)


def case_write_and_read(box):
    info = box.files.write("/tmp/new/deep/a.txt", "héllo")
    assert (info.name, info.path, info.type) == ("a.txt", "/tmp/new/deep/a.txt", FileType.FILE)
    assert box.files.read("/tmp/new/deep/a.txt") == "héllo"
    assert box.files.read("/tmp/new/deep/a.txt", format="bytes") == "héllo".encode()
    assert b"".join(box.files.read("/tmp/new/deep/a.txt", format="stream")) == "héllo".encode()
    box.files.write("/tmp/new/deep/a.txt", b"\x00\xff")
    assert box.files.read("/tmp/new/deep/a.txt", format="bytes") == b"\x00\xff"
    box.files.write("/tmp/empty", "")
    assert box.files.read("/tmp/empty") == ""


def case_relative_paths(box):
    assert box.files.write("note.txt", "x").path == "/root/note.txt"
    assert box.files.read("~/note.txt") == "x"
    assert box.files.exists("note.txt")


def case_odd_names(box):
    for name in ("a b", "ü & ß?#%41+", "quote'\"x", "new\nline" if False else "tab\tx", "-dash", "semi;colon"):
        path = f"/tmp/odd/{name}"
        box.files.write(path, name)
        assert box.files.read(path) == name
        assert box.files.get_info(path).name == name
    assert len(box.files.list("/tmp/odd")) == 6


def case_names_that_are_not_text(box):
    box.commands.run("mkdir /tmp/raw; touch $'/tmp/raw/\\xff\\xfe'; ln -s $'\\xff' /tmp/raw/link")
    entries = box.files.list("/tmp/raw")
    assert [(entry.name, entry.symlink_target) for entry in entries] == [("link", "\ufffd"), ("\ufffd\ufffd", None)]


def case_users_files_that_are_broken(box):
    box.commands.run(
        "printf 'x\\xff:x:77:77::/:/bin/sh\\n::::\\nuser:x\\n' >> /etc/passwd; printf '\\xff' > /etc/group"
    )
    box.commands.run("touch /tmp/u; chown 77:77 /tmp/u")
    time.sleep(1.1)  # users inside are looked up again after a second
    assert box.commands.run("id -u", user="user").stdout == "0\n"
    info = box.files.get_info("/tmp/u")
    assert (info.owner, info.group) == ("x\ufffd", "77")
    box.commands.run("rm /etc/group; ln -s /dev/zero /etc/group")
    time.sleep(1.1)
    assert box.commands.run("id -u", user="user").stdout == "0\n"


def case_write_io(box):
    box.files.write("/tmp/b", io.BytesIO(b"bytes" * 1000))
    assert box.files.read("/tmp/b") == "bytes" * 1000
    box.files.write("/tmp/t", io.StringIO("tëxt"))
    assert box.files.read("/tmp/t") == "tëxt"
    with tempfile.TemporaryFile() as file:
        file.write(b"f" * 3_000_000)
        file.seek(0)
        box.files.write("/tmp/f", file)
    assert box.files.get_info("/tmp/f").size == 3_000_000


def case_gzip(box):
    data = os.urandom(300_000) + b"a" * 5_000_000
    box.files.write("/tmp/z", data, gzip=True)
    assert box.files.read("/tmp/z", format="bytes", gzip=True) == data
    box.files.write("/tmp/o", data, use_octet_stream=True)
    assert box.files.get_info("/tmp/o").size == len(data)


def case_write_many(box):
    files = [{"path": f"/tmp/many/{n}/f.txt", "data": f"content {n}"} for n in range(30)]
    files.append({"path": "/tmp/many/bytes", "data": b"\r\n--x\r\n" * 1000})
    infos = box.files.write_files(files)
    assert [info.path for info in infos] == [file["path"] for file in files]
    assert box.files.read("/tmp/many/17/f.txt") == "content 17"
    assert box.files.read("/tmp/many/bytes", format="bytes") == b"\r\n--x\r\n" * 1000
    assert box.files.write_files([]) == []


def case_large_file(box):
    data = os.urandom(1 << 20) * 30
    box.files.write("/tmp/large", data)
    assert box.files.read("/tmp/large", format="bytes") == data
    size = sum(len(chunk) for chunk in box.files.read("/tmp/large", format="stream"))
    assert size == len(data)


def case_file_errors(box):
    raises(FileNotFoundException, lambda: box.files.read("/tmp/none"))
    raises(InvalidArgumentException, lambda: box.files.read("/tmp"))
    raises(FileNotFoundException, lambda: box.files.list("/tmp/none"))
    raises(FileNotFoundException, lambda: box.files.get_info("/tmp/none"))
    raises(FileNotFoundException, lambda: box.files.rename("/tmp/none", "/tmp/other"))
    raises(InvalidArgumentException, lambda: box.files.list("/etc/passwd"))
    raises(SandboxException, lambda: box.files.write("/etc/forbidden", "x", user="nobody"))
    raises(SandboxException, lambda: box.files.write("/tmp/m", "x", metadata={"a": "b"}), "metadata")


def case_disk_full(box):
    total = box.get_metrics()[0].disk_total
    error = raises(CommandExitException, lambda: box.commands.run(f"fallocate -l {total + (1 << 20)} /tmp/too-much"))
    assert "No space" in error.stderr or "quota" in error.stderr, error.stderr
    box.commands.run(f"rm -f /tmp/too-much; fallocate -l {total - (6 << 20)} /tmp/fill")
    raises(NotEnoughSpaceException, lambda: box.files.write("/tmp/more", os.urandom(12 << 20)))


def case_list(box):
    box.files.write_files(
        [{"path": f"/tmp/tree/{p}", "data": "x" * 10} for p in ("a", "d1/b", "d1/d2/c", "d1/d2/d3/d")]
    )
    box.commands.run("ln -s a /tmp/tree/link; chmod 640 /tmp/tree/a")
    entries = box.files.list("/tmp/tree")
    assert [(e.name, e.type) for e in entries] == [
        ("a", FileType.FILE),
        ("d1", FileType.DIR),
        ("link", FileType.SYMLINK),
    ]
    first = entries[0]
    assert (first.path, first.size, first.mode, first.permissions) == ("/tmp/tree/a", 10, 0o640, "-rw-r-----")
    assert (first.owner, first.group) == ("root", "root")
    assert abs(first.modified_time.timestamp() - time.time()) < 600
    assert entries[2].symlink_target is not None
    assert [e.path for e in box.files.list("/tmp/tree", depth=2)] == [
        "/tmp/tree/a",
        "/tmp/tree/d1",
        "/tmp/tree/d1/b",
        "/tmp/tree/d1/d2",
        "/tmp/tree/link",
    ]
    assert len(box.files.list("/tmp/tree", depth=10)) == 8
    raises(InvalidArgumentException, lambda: box.files.list("/tmp/tree", depth=0))


def case_exists_and_info(box):
    box.files.write("/tmp/i", "12345")
    assert box.files.exists("/tmp/i")
    assert box.files.exists("/tmp")
    assert not box.files.exists("/tmp/none")
    info = box.files.get_info("/tmp/i")
    assert (info.name, info.path, info.size, info.type) == ("i", "/tmp/i", 5, FileType.FILE)
    assert box.files.get_info("/tmp").type == FileType.DIR


def case_rename(box):
    box.files.write("/tmp/old", "x")
    info = box.files.rename("/tmp/old", "/tmp/fresh/place/new")
    assert info.path == "/tmp/fresh/place/new"
    assert not box.files.exists("/tmp/old")
    assert box.files.read("/tmp/fresh/place/new") == "x"


def case_remove(box):
    box.files.write("/tmp/gone/a/b", "x")
    box.files.remove("/tmp/gone/a/b")
    assert not box.files.exists("/tmp/gone/a/b")
    box.files.remove("/tmp/gone")
    assert not box.files.exists("/tmp/gone")
    box.files.remove("/tmp/gone")


def case_make_dir(box):
    assert box.files.make_dir("/tmp/m/a/k/e") is True
    assert box.files.make_dir("/tmp/m/a/k/e") is False
    assert box.files.get_info("/tmp/m/a/k/e").type == FileType.DIR
    box.files.write("/tmp/file", "x")
    raises(InvalidArgumentException, lambda: box.files.make_dir("/tmp/file"))


def case_signed_urls(box):
    box.files.write("/tmp/signed file", "secret")

    def fetch(url, data=None, content_type=None, host=None):
        request = urllib.request.Request(url, data=data, headers={"Host": host} if host else {})
        if content_type:
            request.add_header("Content-Type", content_type)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.read()

    def status(url, **more):
        try:
            fetch(url, **more)
        except urllib.error.HTTPError as error:
            return error.code if json.loads(error.read())["code"] == error.code else None
        return 200

    assert fetch(box.download_url("/tmp/signed file")) == b"secret"
    host = f"49983-{box.sandbox_id}.sandboxes.test"
    assert fetch(box.download_url("/tmp/signed file"), host=host) == b"secret"
    assert status(box.download_url("/tmp/signed file"), host=f"49983-{box.sandbox_id[::-1]}.test") == 401
    assert fetch(box.download_url("/tmp/signed file", use_signature_expiration=60)) == b"secret"
    assert status(box.download_url("/tmp/signed file", use_signature_expiration=-60)) == 401
    assert status(box.download_url("/tmp/signed file").replace("signature=v1_", "signature=v1_x")) == 401
    assert status(box.download_url("/tmp/signed file").replace("signed", "other")) == 401
    assert status(box.download_url("/tmp/signed file").partition("&signature")[0], host=host) == 401
    url = box.upload_url("/tmp/up", use_signature_expiration=60)
    form = b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nuploaded\r\n--B--\r\n'
    fetch(url, form, "multipart/form-data; boundary=B")
    assert box.files.read("/tmp/up") == "uploaded"
    assert status(box.download_url("/tmp/up"), data=form, content_type="multipart/form-data; boundary=B") == 401
    assert fetch(box.download_url("/tmp/up", user="nobody")) == b"uploaded"


if __name__ == "__main__":
    run(globals())
