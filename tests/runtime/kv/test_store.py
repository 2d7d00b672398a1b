"""Blocks as files: whole or not at all, found by their prefix only, the longest unused removed first."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pagec.compiler.errors import CapacityError
from pagec.runtime.kv.store import BlockName, BlockStore

OWNER = hashlib.sha256(b"artifact").digest()
BLOCK_BYTES = 3000
PREFIX = b"\0\0\0\0" + bytes(range(64))
NAME = BlockName(hashlib.sha256(PREFIX).digest(), 0)


def store(path: Path, owner: bytes = OWNER, limit: int = 1 << 30) -> BlockStore:
    return BlockStore(path, owner, BLOCK_BYTES, limit)


def block(number: int) -> bytes:
    return bytes([number % 256]) * BLOCK_BYTES


def name(number: int) -> BlockName:
    return BlockName(hashlib.sha256(bytes([number])).digest(), number % 3)


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv*"))


def test_a_block_is_read_as_it_was_written_by_another_process_too(tmp_path: Path) -> None:
    first = store(tmp_path)
    assert not first.has(NAME)
    assert first.read(NAME, PREFIX) is None
    first.write(NAME, PREFIX, block(7))
    for found in (first, store(tmp_path)):
        assert found.has(NAME)
        assert found.read(NAME, PREFIX) == block(7)
    assert (first.written_bytes, first.read_bytes, first.num_damaged) == (BLOCK_BYTES, BLOCK_BYTES, 0)
    assert [file.stat().st_mode & 0o777 for file in files(tmp_path)] == [0o600]


def test_a_hash_alone_finds_nothing(tmp_path: Path) -> None:
    """Another tenant's salt, other tokens, a longer prefix with the same hash: misses, and no damage."""
    kept = store(tmp_path)
    kept.write(NAME, PREFIX, block(1))
    for other in (b"\1\0\0\0b" + PREFIX[4:], PREFIX[:-1] + b"x", PREFIX + bytes(64), b""):
        assert kept.read(NAME, other) is None
    assert kept.num_damaged == 0
    assert kept.read(NAME, PREFIX) == block(1)


def test_another_artifact_finds_nothing(tmp_path: Path) -> None:
    store(tmp_path).write(NAME, PREFIX, block(1))
    other = store(tmp_path, owner=hashlib.sha256(b"another").digest())
    assert not other.has(NAME)
    assert other.read(NAME, PREFIX) is None


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        lambda content: content + b"x",
        lambda content: b"",  # noqa: ARG005
        lambda content: b"pagecKV0" + content[8:],
        lambda content: content[:60] + b"y" + content[61:],
        lambda content: content[:72] + b"\xff" * 16 + content[88:],
        lambda content: b"something else entirely",  # noqa: ARG005
    ],
)
def test_what_is_damaged_is_a_miss_counted_and_removed(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    kept = store(tmp_path)
    kept.write(NAME, PREFIX, block(1))
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert kept.read(NAME, PREFIX) is None
    assert kept.num_damaged == 1
    assert files(tmp_path) == []
    kept.write(NAME, PREFIX, block(1))
    assert kept.read(NAME, PREFIX) == block(1)


def test_a_file_of_another_artifact_under_our_name_is_foreign(tmp_path: Path) -> None:
    other = hashlib.sha256(b"another").digest()
    store(tmp_path, owner=other).write(NAME, PREFIX, block(2))
    kept = store(tmp_path)
    (file,) = files(tmp_path)
    file.rename(tmp_path / OWNER.hex() / file.name)
    assert kept.read(NAME, PREFIX) is None
    assert kept.num_damaged == 1
    assert files(tmp_path) == []


def test_a_directory_in_a_files_place_is_no_crash(tmp_path: Path) -> None:
    kept = store(tmp_path)
    (tmp_path / OWNER.hex() / f"{NAME.hash.hex()}-0.kv").mkdir()
    assert kept.read(NAME, PREFIX) is None
    kept.write(NAME, PREFIX, block(1))
    assert store(tmp_path).read(NAME, PREFIX) is None


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    size = BLOCK_BYTES + 200
    kept = store(tmp_path, limit=8 * size)
    for number in range(8):
        kept.write(name(number), b"", block(number))
        os.utime(files(tmp_path)[-1])
    for number, file in enumerate(f"{name(n).hash.hex()}-{name(n).group}.kv" for n in range(8)):
        os.utime(tmp_path / OWNER.hex() / file, (1000 + number, 1000 + number))
    assert kept.read(name(0), b"") == block(0)  # used just now
    kept.write(name(8), b"", block(8))
    kept.write(name(9), b"", block(9))
    left = [number for number in range(10) if kept.has(name(number))]
    assert {0, 8, 9} <= set(left)
    assert left == [0, *range(10 - len(left) + 1, 10)]
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 8 * size
    assert kept.num_removed == 10 - len(left)


def test_the_limit_counts_all_artifacts_files_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes.kv").write_bytes(bytes(100_000))
    own = tmp_path / "user"
    own.mkdir()
    (own / f"{NAME.hash.hex()}-0.kv").write_bytes(bytes(100_000))
    store(tmp_path, owner=hashlib.sha256(b"old").digest()).write(NAME, PREFIX, block(1))
    (old,) = [file for file in files(tmp_path) if len(file.parent.name) == 64]
    os.utime(old, (1000, 1000))
    kept = store(tmp_path, limit=old.stat().st_size + 100)
    assert kept.used_bytes == old.stat().st_size
    kept.write(NAME, PREFIX, block(2))
    assert kept.read(NAME, PREFIX) == block(2)
    assert not old.exists()
    assert (tmp_path / "notes.kv").exists()
    assert (own / f"{NAME.hash.hex()}-0.kv").exists()


def test_a_block_larger_than_the_limit_is_not_written(tmp_path: Path) -> None:
    kept = store(tmp_path, limit=BLOCK_BYTES)
    kept.write(NAME, PREFIX, block(1))
    assert files(tmp_path) == []


def test_what_was_abandoned_half_written_is_removed(tmp_path: Path) -> None:
    store(tmp_path)
    old, new = (tmp_path / OWNER.hex() / f"{NAME.hash.hex()}-0.kv.1-{n}.tmp" for n in range(2))
    old.write_bytes(b"pagec")
    new.write_bytes(b"pagec")
    os.utime(old, (1000, 1000))
    store(tmp_path)
    assert files(tmp_path) == [new]


def test_a_write_that_fails_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    kept = store(tmp_path)
    (tmp_path / OWNER.hex()).rmdir()
    kept.write(NAME, PREFIX, block(1))
    assert kept.num_failed == 1
    assert not kept.has(NAME)


def test_writers_and_readers_share_a_directory(tmp_path: Path) -> None:
    """Two stores write, read and remove at once: what is read is whole, and nothing raises."""
    wrong: list[object] = []

    def work(number: int) -> None:
        own = BlockStore(tmp_path, OWNER, BLOCK_BYTES, 12 * (BLOCK_BYTES + 200))
        try:
            for step in range(300):
                n = (step * 7 + number) % 30
                own.write(name(n), bytes([n]), block(n))
                found = own.read(name(n * 11 % 30), bytes([n * 11 % 30]))
                if found is not None and found != block(n * 11 % 30):
                    wrong.append(found)
            wrong.extend(["damaged"] * own.num_damaged)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CapacityError, match="kv_dir"):
        store(tmp_path / "file")
