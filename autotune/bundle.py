"""A bundle: kernels to be timed on a GPU where pagec's compiler is not, and the lines of results it gives.

    bundle.json             target, versions, templates' hashes; cases and their trials; launch metadata
    kernels/<key>.cubin     machine code
    kernels/<key>.py        its source, for people

A *case* is a problem of a table's bucket; a *trial* is a point of it: the launches that compute it. Results
are lines of JSON: a first one that says which bundle ran on which GPU, then one for each case. The standard
library suffices to read both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pagec.autotune.measure import Sample
from pagec.autotune.problem import Kind, Problem, problem_from
from pagec.compiler.errors import ArtifactError
from pagec.compiler.gpu_program import GpuLaunch
from pagec.compiler.launch import LaunchMetadata
from pagec.compiler.target import CudaTarget

FORMAT: Final = 1
MANIFEST: Final = "bundle.json"
KERNELS: Final = "kernels"
REMEDY: Final = "make it anew (pagec tune prepare)"


@dataclass(frozen=True, slots=True)
class Trial:
    """A point and the launches that compute the case with it.

    `modes`: of which choices it may become one; `untuned`: of which it is what stands where nothing is tuned.
    `mma`: its matrix instruction. `sizes`: what of the step's arrays depends on the point (block_size,
    query_tile, split, splits). `launches`: their arguments are names of bundle_arrays.py.
    """

    point: Mapping[str, int]
    modes: tuple[str, ...]
    untuned: tuple[str, ...]
    mma: str
    registers: int
    shared_bytes: int
    predicted_us: float | None
    sizes: Mapping[str, int]
    launches: tuple[GpuLaunch, ...]

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Trial:
        launches = tuple(GpuLaunch(**{**one, "args": tuple(one["args"])}) for one in data["launches"])
        lists = {name: tuple(data[name]) for name in ("modes", "untuned")}
        return Trial(**{**data, **lists, "launches": launches})


@dataclass(frozen=True, slots=True)
class Case:
    """A bucket of a table's entry, up to `rows` rows (0: any number), at the sizes that it is weighed at."""

    kind: Kind
    key: str
    rows: int
    sizes: Mapping[str, int]
    trials: tuple[Trial, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.key}/{self.rows or 'any'}"

    @property
    def problem(self) -> Problem:
        return problem_from(self.kind, self.sizes)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Case:
        return Case(**{**data, "trials": tuple(map(Trial.from_json, data["trials"]))})


@dataclass(frozen=True, slots=True)
class BundleKernel:
    """Machine code in kernels/<file>.cubin, its sha256, and how it is launched."""

    file: str
    sha256: str
    launch: LaunchMetadata


@dataclass(frozen=True, slots=True)
class Bundle:
    """What bundle.json says. `templates`: hashes by kind; `dtype`: of all inputs and results."""

    target: CudaTarget
    versions: Mapping[str, str]
    templates: Mapping[str, str]
    dtype: str
    cases: tuple[Case, ...]
    kernels: Mapping[str, BundleKernel]

    def text(self) -> str:
        """bundle.json: the same bundle gives the same bytes."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """Names the bundle in its results."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]


def read_bundle(directory: Path) -> Bundle:
    """The bundle in a directory; ArtifactError if there is none, or one of another format."""
    path = directory / MANIFEST
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise ArtifactError("is a bundle of another format", place=str(path), remedy=REMEDY)
        kernels = {
            name: BundleKernel(one["file"], one["sha256"], LaunchMetadata.from_json(one["launch"]))
            for name, one in data["kernels"].items()
        }
        cases = tuple(map(Case.from_json, data["cases"]))
        target = CudaTarget.from_json(data["target"])
        return Bundle(**{**data, "target": target, "cases": cases, "kernels": kernels})
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", place=str(path), remedy=REMEDY) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"is no bundle ({error})", place=str(path), remedy=REMEDY) from error


def read_image(directory: Path, kernel: BundleKernel) -> bytes:
    """A kernel's machine code; ArtifactError if it is damaged."""
    path = directory / KERNELS / f"{kernel.file}.cubin"
    image = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(image).hexdigest() != kernel.sha256:
        raise ArtifactError("is missing or damaged", place=str(path), remedy=REMEDY)
    return image


# ------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class Timing:
    """A trial's times in the first and in the second half of the rounds; or what is `wrong` with it."""

    trial: Trial
    halves: tuple[Sample, Sample] | None
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """A case's trials with their times; `failed`: why it has none."""

    case: Case
    timings: tuple[Timing, ...]
    rounds: int = 0
    failed: str = ""

    def to_json(self) -> dict[str, Any]:
        """A line of results: the case without its launches, for the bundle may be gone when it is read."""
        data = asdict(self.case)
        for trial, timing in zip(data["trials"], self.timings, strict=False):
            trial["halves"] = timing.halves and [asdict(half) for half in timing.halves]
            trial["wrong"] = timing.wrong
        for trial in data["trials"]:
            del trial["launches"]
        return {**data, "rounds": self.rounds, "failed": self.failed}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Timed:
        timings = []
        for one in data["trials"]:
            rest = {name: value for name, value in one.items() if name not in ("halves", "wrong")}
            halves = [Sample(**half) for half in one.get("halves") or ()]
            trial = Trial.from_json({**rest, "launches": ()})
            timings.append(Timing(trial, (halves[0], halves[1]) if halves else None, one.get("wrong", "")))
        trials = tuple(timing.trial for timing in timings)
        case = Case(data["kind"], data["key"], data["rows"], data["sizes"], trials)
        return Timed(case, tuple(timings), data["rounds"], data["failed"])


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of results. `target`: its name; `device`: the GPU as it and its driver name themselves,
    clocks if they are known."""

    bundle: str
    target: str
    versions: Mapping[str, str]
    templates: Mapping[str, str]
    device: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def holds_results(path: Path) -> bool:
    """Whether a file looks like results, not like a table."""
    try:
        with path.open() as file:
            return "bundle" in json.loads(file.readline())
    except (OSError, ValueError, TypeError):
        return False


def read_results(path: Path) -> tuple[Head, dict[str, Timed]]:
    """The head, and results by their cases' names, later ones before earlier; a last line that is cut off is
    left out. ArtifactError if the file holds no results."""
    remedy = "name a file that the bundle's runner wrote"
    try:
        lines = path.read_text().split("\n")
        data = json.loads(lines[0])
        if data.pop("format") != FORMAT:
            raise ArtifactError("holds results of another format", place=str(path), remedy=remedy)
        found = [Timed.from_json(json.loads(line)) for line in lines[1:-1]]
        return Head(**data), {one.case.name: one for one in found}
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", place=str(path), remedy=remedy) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ArtifactError(f"holds no results ({error})", place=str(path), remedy=remedy) from error
