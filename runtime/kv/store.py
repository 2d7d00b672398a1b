"""The KV cache's lowest tier: blocks as files, which outlive the process.

    DIR/<owner>/<hash>-<group>.kv     `owner`: the digest of artifact, weights and KV layout; who has another
                                      finds no block. `hash`: the chained hash of a prefix that ends with it.

    file = magic, sha256 of all that follows, owner, sizes, the prefix (salt and all its tokens), the block

A hash only finds a file; the prefix is compared, so that no collision hands out another's block. sha256 and
not a CRC: a wrong block is a wrong answer that nobody notices, and 0.2 ms for a block (1.8 GB/s) are little
beside the 10 ms that computing it takes.

One file per block: a file of many blocks read 2.5 times as fast from a cold disk (7 ms against 18 for 512
tokens of SmolLM2, 1.2 against 1.8 from the page cache; computing them takes 300), but would have to be
collected when some of its blocks grow cold. So the file system is the index: any number of processes may
share a directory, a file appears whole (written aside, then renamed), its mtime is its last use, and the
longest unused go first when the files exceed the limit. No fsync: what a crash tears has a wrong sum.

What is damaged, cut short or foreign is a miss: it is counted and removed. Only names as above are looked at.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

from pagec.compiler.errors import CapacityError

MAGIC: Final = b"pagecKV1"
# No larger file is read to its end, whoever wrote it.
MAX_PREFIX_BYTES: Final = 16 << 20
# What a process that died left behind is removed after this time.
ABANDONED_S: Final = 3600.0
# After a removal the files fill this part of the limit, so that not every write has to remove some.
LOW_WATER: Final = 7 / 8
# Others may write, too: all files are counted anew after writing this part of the limit.
RECOUNT: Final = 1 / 16

_HEAD: Final = Struct("<8s32s32sQQ")
_SUMMED: Final = 8 + 32  # the sum covers what follows it
_OWNER: Final = re.compile(r"[0-9a-f]{64}")
_FILE: Final = re.compile(r"[0-9a-f]{0,128}-\d{1,4}\.kv(\.[\d-]+\.tmp)?")


class BlockName(NamedTuple):
    """A block by its prefix's chained hash, and its KV group."""

    hash: bytes
    group: int


class _File(NamedTuple):
    used: float
    size: int
    path: str


class BlockStore:
    """Blocks of `block_bytes` in files below `root`, at most `limit_bytes` altogether, of all owners.

    `owner`: sha256 of whatever decides what a block means. CapacityError if the directory cannot be used.
    `write` and `read` may run in a thread each.
    """

    def __init__(self, root: Path, owner: bytes, block_bytes: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0  # as counted last, and what was written since
        self.written_bytes = self.read_bytes = 0
        self.num_damaged = self.num_removed = self.num_failed = 0
        self._root, self._owner, self._block_bytes = root, owner, block_bytes
        self._path = root / owner.hex()
        self._uncounted = self._number = 0
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self._path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError("not readable and writable")
        except OSError as error:
            raise CapacityError(
                f"KV blocks cannot be kept here ({error})",
                place=str(root),
                remedy="name a directory that may be written (kv_dir)",
            ) from error
        self._make_room(0)

    def has(self, name: BlockName) -> bool:
        """Whether there is a file for it; whether it is whole shows when it is read."""
        return os.path.exists(self._file(name))  # a third of the time that Path takes

    def write(self, name: BlockName, prefix: bytes, block: Any) -> None:
        """Keeps a block, unless there is one of this name. A full disk is counted, not raised."""
        path = self._file(name)
        if self.has(name):
            return
        body = memoryview(block).cast("B")
        head = _HEAD.pack(MAGIC, bytes(32), self._owner, len(prefix), len(body)) + prefix
        found = hashlib.sha256(head[_SUMMED:])
        found.update(body)
        head = MAGIC + found.digest() + head[_SUMMED:]
        size = len(head) + len(body)
        if size > self.limit_bytes:
            return
        if self.used_bytes + size > self.limit_bytes or self._uncounted > self.limit_bytes * RECOUNT:
            self._make_room(size)
        self._number += 1
        aside = f"{path}.{os.getpid()}-{self._number}.tmp"
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 0) as file:
                for part in (head, body):
                    if file.write(part) != len(part):
                        raise OSError("the disk is full")
            os.rename(aside, path)
        except OSError:
            self.num_failed += 1
            _remove(aside)
            return
        self.used_bytes += size
        self._uncounted += size
        self.written_bytes += len(body)

    def read(self, name: BlockName, prefix: bytes) -> memoryview | None:
        """The block of this prefix; None if there is none, or none that is whole."""
        path = self._file(name)
        try:
            with open(path, "rb", 0) as file:
                size = os.fstat(file.fileno()).st_size
                most = _HEAD.size + MAX_PREFIX_BYTES + self._block_bytes
                content = memoryview(bytearray(min(size, most)))
                whole = file.readinto(content) == size
        except FileNotFoundError:
            return None
        except OSError:
            whole, content = False, memoryview(b"")
        if not whole or not self._is_ours(content):
            self.num_damaged += 1
            _remove(path)
            return None
        start = _HEAD.size + int(_HEAD.unpack_from(content)[3])
        if bytes(content[_HEAD.size : start]) != prefix:
            return None  # another's: their hashes are equal
        with suppress(OSError):  # removed by another process meanwhile: what was read is right
            os.utime(path)
        self.read_bytes += self._block_bytes
        return content[start:]

    def _is_ours(self, content: memoryview) -> bool:
        """Whether a file is whole and of this owner."""
        if len(content) < _HEAD.size:
            return False
        magic, expected, owner, prefix_bytes, block_bytes = _HEAD.unpack_from(content)
        return bool(
            magic == MAGIC
            and owner == self._owner
            and block_bytes == self._block_bytes
            and len(content) == _HEAD.size + prefix_bytes + block_bytes
            and hashlib.sha256(content[_SUMMED:]).digest() == expected
        )

    def _file(self, name: BlockName) -> str:
        return f"{self._path}/{name.hash.hex()}-{name.group}.kv"

    def _make_room(self, size: int) -> None:
        """Counts all owners' files; if they and `size` more exceed the limit, removes the longest unused."""
        files = sorted(self._files())
        total = sum(file.size for file in files)
        if total + size > self.limit_bytes:
            most = max(int(self.limit_bytes * LOW_WATER) - size, 0)
            for file in files:
                if total <= most:
                    break
                _remove(file.path)
                total -= file.size
                self.num_removed += 1
        self.used_bytes, self._uncounted = total, 0

    def _files(self) -> Iterator[_File]:
        """All owners' blocks. What was abandoned half written is removed."""
        for directory in _entries(self._root):
            if not _OWNER.fullmatch(directory.name):
                continue
            for entry in _entries(directory.path):
                if not (match := _FILE.fullmatch(entry.name)):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # removed by another process a moment ago
                if match[1] is None:
                    yield _File(found.st_mtime, found.st_size, entry.path)
                elif found.st_mtime + ABANDONED_S < time.time():
                    _remove(entry.path)


def _entries(path: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _remove(path: str) -> None:
    with suppress(OSError):  # gone already, or not ours to remove
        os.unlink(path)
