"""Every error that pagec raises for its users.

PagecError              something the user can mend; says where and how
|- SpecError            a model spec (YAML) is wrong: file, path, line and column
|- CheckpointError      a checkpoint is incomplete, misshapen or of an unknown kind
|- TargetError          no such target, or it cannot do what is asked
|- CompileError         a correct spec that this backend cannot lower
|- ArtifactError        an artifact is stale, damaged, or made for another machine
|- CapacityError        more than the artifact or the memory holds: both numbers are named
|- DeviceError          a GPU, its driver or a kernel on it fails: the driver's own words are quoted
`- RequestError         one request is invalid; only that request ends

Anything else that escapes is a defect of pagec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class PagecError(Exception):
    """An error that a user can mend.

    `place` names where (a file, a YAML path, a kernel key, a request field), `remedy` what to do.
    """

    def __init__(self, message: str, *, place: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text}\n  fix: {self.remedy}" if self.remedy else text


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a spec: where it stands (1-based line and column), what is wrong, how to mend it."""

    file: str
    path: str
    line: int
    column: int
    message: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        at = f" at {self.path}" if self.path else ""
        fix = f"\n  fix: {self.remedy}" if self.remedy else ""
        return f"{where}{at}: {self.message}{fix}"


class SpecError(PagecError):
    """A model spec is wrong. Holds every problem that was found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = tuple(problems)


class CheckpointError(PagecError):
    """A checkpoint is incomplete, misshapen or of an unknown kind."""


class TargetError(PagecError):
    """No such target, or it cannot do what is asked."""


class CompileError(PagecError):
    """A correct spec that the chosen backend cannot lower."""


class ArtifactError(PagecError):
    """An artifact is stale, damaged, or made for another machine or version."""


class CapacityError(PagecError):
    """More is asked than the artifact or the memory holds."""


class DeviceError(PagecError):
    """A GPU, its driver or a kernel on it fails; `place` names the kernel where one is to blame."""


class RequestError(PagecError):
    """One request is invalid; `place` names the field."""
