"""Compiles every kernel that pagec ships for NVIDIA GPUs, on all cores, and records what the compiler says.

    make check-cuda                         what has changed since it was recorded
    make check-cuda CHECK_FLAGS=--all       everything, by no cache
    make check-cuda TRITON=3.6.0            a few kernels of every template by another Triton (--templates);
                                            nothing is recorded

Fails on a kernel that uses a stack or spills, that a GPU cannot hold, or whose matrix products are not by the
GPU's own instructions. An interrupted run goes on where it was.
Needs Triton, and neither a GPU nor torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from support.cuda_records import Records, compile_records, faults, hashes, read_records, write_records
from support.cuda_shipped import Shipped, all_shipped, of_templates

from pagec.compiler.backends.cuda.build import triton_version
from pagec.compiler.driver import CUBINS, cache_root

# Kernels between two writings of the records.
BATCH: Final = 32


def main() -> int:
    """How many kernels are not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--all", action="store_true", help="compile what has not changed, too")
    parser.add_argument("--templates", action="store_true", help="a few kernels of each template alone")
    options = parser.parse_args()
    began = time.monotonic()
    cache = None if options.all or options.templates else cache_root() / CUBINS
    if options.templates:
        shipped = {one.name: one for one in of_templates()}
        records = _compiled(shipped, {}, cache, store=False)
    else:
        shipped = all_shipped()
        current = hashes(shipped)
        known = {} if options.all else read_records()
        kept = {
            name: known[name] for name in shipped if name in known and known[name].sha256 == current[name]
        }
        records = _compiled(shipped, kept, cache, store=True)
    wrong = faults(shipped, records)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(
        f"{len(shipped)} kernels, {len(wrong)} of them not clean, "
        f"triton {triton_version()}, {time.monotonic() - began:.0f} s"
    )
    return len(wrong)


def _compiled(shipped: Mapping[str, Shipped], kept: Records, cache: Path | None, *, store: bool) -> Records:
    """The records of all, of which those `kept` need no compiling; `store`: they are written, too."""
    records, left = dict(kept), (name for name in shipped if name not in kept)
    total = len(shipped) - len(kept)
    print(f"{len(kept)} of {len(shipped)} kernels are known, {total} are to be compiled", flush=True)
    while batch := list(islice(left, BATCH)):
        records |= compile_records({name: shipped[name] for name in batch}, cache)
        print(f"{len(records) - len(kept)} of {total} compiled", flush=True)
        if store:
            write_records(records)
    if store:
        write_records(records)
    return records


if __name__ == "__main__":
    sys.exit(bool(main()))
