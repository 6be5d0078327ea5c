"""Parts of full machines that need no machine: file systems from memory, what a qcow2 header may say, keys."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.backends.vm import screen
from dsec.errors import EnvironmentNotFound, InvalidRequest, NotFound
from dsec.vmm import fat, qcow2, seed
from dsec.vmm.images import ImageStore, Traits


def read_fat(image: bytes) -> dict[str, bytes]:
    """All files of a FAT16, by the long names where there are some. As the specification of the format says it."""
    sector, cluster, reserved, fats, entries = struct.unpack_from("<HBHBH", image, 11)
    fat_sectors = struct.unpack_from("<H", image, 22)[0]
    table = struct.unpack_from(f"<{fat_sectors * sector // 2}H", image, reserved * sector)
    root = (reserved + fats * fat_sectors) * sector
    data = root + entries * 32

    def chain(first: int) -> bytes:
        found = b""
        while first < 0xFFF8:
            at = data + (first - 2) * cluster * sector
            found += image[at : at + cluster * sector]
            first = table[first]
        return found

    def walk(content: bytes, above: str) -> Iterator[tuple[str, bytes]]:
        long = ""
        for at in range(0, len(content), 32):
            entry = content[at : at + 32]
            if entry[0] == 0:
                return
            if entry[11] == 0x0F:
                part = (entry[1:11] + entry[14:26] + entry[28:32]).decode("utf-16-le").split("\0")[0].rstrip("\uffff")
                long = part + long
                continue
            short = entry[:8].decode().strip() + (f".{entry[8:11].decode().strip()}" if entry[8:11].strip() else "")
            name, long = long or short, ""
            first, size = struct.unpack_from("<HI", entry, 26)
            if entry[11] == 0x10 and not name.startswith("."):
                yield from walk(chain(first), f"{above}{name}/")
            elif entry[11] == 0x20:
                yield f"{above}{name}", chain(first)[:size] if size else b""

    return dict(walk(image[root : root + entries * 32], ""))


def test_a_file_system_holds_what_was_put_into_it() -> None:
    files = {
        "EFI/BOOT/BOOTX64.EFI": bytes(range(256)) * 700,
        "loader/entries/a-long-name.of-an-entry.conf": b"options",
        "user-data": b"#cloud-config\n",
        "empty": b"",
        "README.TXT": b"x" * 512,
        **{f"many/file-number-{number}": str(number).encode() for number in range(60)},
    }
    for size in (0, 40 << 20):
        image = fat.make(files, "CIDATA", size)
        assert read_fat(image) == files
        assert image[510:512] == b"\x55\xaa"
        assert len(image) <= size or not size


def test_a_file_system_that_is_too_small_says_so() -> None:
    with pytest.raises(InvalidRequest, match="don't fit"):
        fat.make({"a": bytes(8 << 20)}, "X", 4 << 20)
    with pytest.raises(InvalidRequest, match="larger than that"):
        fat.make({"a": b""}, "X", 1 << 20)


def test_the_seed_has_what_cloud_init_and_the_service_want() -> None:
    files = read_fat(seed.make(b"\x7fELF"))
    assert files["user-data"].startswith(b"#cloud-config\n")
    assert b"dsec-install" in files["user-data"]
    assert b"instance-id" in files["meta-data"]
    assert files["dsec-guest"] == b"\x7fELF"
    assert b"--service" in files[seed.UNIT_NAME]
    assert set(read_fat(seed.make(None))) == {"user-data", "meta-data"}


def header(**changes: int) -> bytes:
    """Of a qcow2 of version 3 that is in order."""
    values = {"version": 3, "backing": 0, "backing_size": 0, "bits": 16, "size": 1 << 30, "crypt": 0}
    values |= {"incompatible": 0, "length": 104, "extension": 0} | changes
    order = ("version", "backing", "backing_size", "bits", "size", "crypt")
    head = qcow2.MAGIC + struct.pack(">IQIIQI", *(values[name] for name in order))
    head = head.ljust(72, b"\0") + struct.pack(">Q", values["incompatible"])
    head = head.ljust(100, b"\0") + struct.pack(">I", values["length"]) + struct.pack(">II", values["extension"], 8)
    return head.ljust(4096, b"\0")


def test_a_qcow2_that_is_whole_is_taken() -> None:
    assert qcow2.check(header(), 1 << 40) == 1 << 30
    assert qcow2.check(header(version=2, extension=0), 1 << 40) == 1 << 30


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"backing": 512, "backing_size": 11}, "backing file"),
        ({"backing_size": 11}, "backing file"),
        ({"incompatible": 4}, "external data file"),
        ({"extension": 0x44415441}, "external data file"),
        ({"extension": 0xE2792ACA}, "backing file"),
        ({"incompatible": 2}, "damaged"),
        ({"incompatible": 1 << 40}, "isn't known"),
        ({"crypt": 2}, "encrypted"),
        ({"version": 4}, "version 4"),
        ({"bits": 40}, "cluster size"),
        ({"size": 0}, "0 bytes"),
        ({"size": 1 << 60}, "at most"),
        ({"length": 4}, "no valid length"),
        ({"extension": 77}, None),
    ],
)
def test_a_qcow2_that_is_not_is_refused(changes: dict[str, int], why: str | None) -> None:
    if why is None:  # an extension that isn't known, of 8 bytes, and then the end
        assert qcow2.check(header(**changes), 1 << 40)
        return
    with pytest.raises(InvalidRequest, match=why):
        qcow2.check(header(**changes), 1 << 40)


def test_a_qcow2_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no end"):
        qcow2.check(header(extension=77)[:112], 1 << 40)
    with pytest.raises(InvalidRequest, match="no qcow2"):
        qcow2.check(b"QFI\xfb", 1 << 40)


def test_disks_are_found_by_name_and_digest(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    (tmp_path / "one").write_bytes(bytes(510) + b"\x55\xaa" + bytes((1 << 20) - 512))
    made = store.import_file(tmp_path / "one", "first", Traits(firmware="bios"))
    again = store.import_file(tmp_path / "one", "second", Traits(firmware="bios"))
    assert made.digest == again.digest
    other = store.import_file(tmp_path / "one", "third", Traits(guest=False))
    assert other.digest != made.digest  # another way to boot it is another machine
    assert store.find("first") == store.find(made.digest)
    assert {name for each in store.list() for name in each.names} == {"first", "second", "third"}
    store.remove("first")
    assert store.find("second").digest == made.digest
    store.remove("second")
    with pytest.raises(EnvironmentNotFound):
        store.find(made.digest)
    store.remove(other.digest)
    assert store.list() == []
    with pytest.raises(NotFound):
        store.remove("third")
    for name in ("../up", "A", "", "a/b", ".hidden"):
        with pytest.raises(InvalidRequest, match="name"):
            store.import_file(tmp_path / "one", name, Traits())
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidRequest, match="0 bytes"):
        store.import_file(tmp_path / "empty", "none", Traits())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"hello\n", "no machine would boot"),
        (bytes(1 << 20), "no machine would boot"),
        (b"KDMV" + bytes(1 << 16), "a VMDK image"),
        (b"\xfd7zXZ\0" + bytes(1 << 16), "compressed"),
        (b"\x1f\x8b" + bytes(508) + b"\x55\xaa", "compressed"),
    ],
)
def test_what_no_machine_would_boot_from_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    store = ImageStore(tmp_path)
    (tmp_path / "one").write_bytes(content)
    with pytest.raises(InvalidRequest, match=why):
        store.import_file(tmp_path / "one", "one", Traits())
    assert store.list() == []


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ("ctrl-l", ["ctrl", "l"]),
        ("Ctrl-Alt-Delete", ["ctrl", "alt", "delete"]),
        ("enter", ["ret"]),
        ("A", ["shift", "a"]),
        ("-", ["minus"]),
        ("ctrl--", ["ctrl", "minus"]),
        ("ctrl-+", ["ctrl", "shift", "equal"]),
        ("?", ["shift", "slash"]),
        ("f12", ["f12"]),
        ("super", ["meta_l"]),
    ],
)
def test_keys_by_their_names(keys: str, names: list[str]) -> None:
    assert screen.chord(keys) == names


@pytest.mark.parametrize("keys", ["ctrl-nothing", "f99", "ä", "hyper-x"])
def test_keys_that_do_not_exist(keys: str) -> None:
    with pytest.raises(InvalidRequest, match=r"no key|not on a US"):
        screen.chord(keys)


def test_a_picture_is_no_png_unless_it_says_so() -> None:
    assert screen.size_of(b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 640, 480) + bytes(20)) == (640, 480)
    assert screen.size_of(b"P6 640 480" + bytes(40)) is None
    assert screen.size_of(b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 1 << 30, 480) + bytes(20)) is None
    assert screen.size_of(b"") is None
