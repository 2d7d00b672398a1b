"""All kernels that pagec ships for NVIDIA GPUs: what is on record of them is of today's sources, clean, and
what the compiler says. `make check-cuda` writes the records."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256

import pytest
from support.cuda_records import Records, compile_records, faults, hashes, read_records
from support.cuda_shipped import Shipped, all_shipped

from pagec.compiler.backends.cuda.build import triton_version

pytest.importorskip("triton")

SAMPLE = 20


@pytest.fixture(scope="module")
def shipped() -> dict[str, Shipped]:
    return all_shipped()


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records()


def test_records_are_of_todays_kernels(shipped: dict[str, Shipped], records: Records) -> None:
    """If this fails, run `make check-cuda` and commit what it writes."""
    now = hashes(shipped)
    stale = [name for name, digest in now.items() if name not in records or records[name].sha256 != digest]
    assert not stale, f"changed since they were compiled, or by triton {triton_version()}: {stale}"
    assert records.keys() == now.keys()


def test_every_shipped_kernel_is_clean(shipped: dict[str, Shipped], records: Records) -> None:
    assert not faults(shipped, records)


def test_faults_are_found(shipped: dict[str, Shipped], records: Records) -> None:
    """Of a kernel that takes warp groups' instructions: each figure that is worse is a fault."""
    name = next(name for name, record in records.items() if record.resources.mma == "HGMMA")
    good = records[name]
    bad = [
        replace(good, resources=replace(good.resources, stack_bytes=8)),
        replace(good, resources=replace(good.resources, shared_bytes=1 << 18)),
        replace(good, resources=replace(good.resources, mma="HMMA")),
        replace(good, copies_ahead=False),
    ]
    assert not faults({name: shipped[name]}, {name: good})
    assert all(len(faults({name: shipped[name]}, {name: one})) == 1 for one in bad)


@pytest.mark.slow
def test_a_sample_compiles_to_what_is_on_record(shipped: dict[str, Shipped], records: Records) -> None:
    """Drawn by what all sources are: the same as long as nothing changes."""
    seed = sha256("".join(one.sha256 for one in records.values()).encode()).digest()
    names = random.Random(seed).sample(sorted(shipped), SAMPLE)
    assert compile_records({name: shipped[name] for name in names}) == {n: records[n] for n in names}
