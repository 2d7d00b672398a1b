"""`check.sh quick`: whether what was compiled computes what it should, on this GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gpu.artifacts import Artifacts
from gpu.device import Loaded, Machine
from gpu.kernels import kernels_beside_reference
from gpu.models import (
    Finding,
    beside_reference,
    graphs_beside_launches,
    in_any_company,
    nothing_compiled,
)
from gpu.results import Line, Results
from pagec.compiler.errors import PagecError

# KV pool of the whole models; the kernels' own pools are small.
POOL_BLOCKS: Final = 600
# A check takes less; later ones would not end in time.
CHECK_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Check:
    """`run` gets the artifact `model`, loaded; None: it loads what it wants."""

    name: str
    model: str | None
    run: Callable[[Any, int], Finding]


def checks(artifacts: Artifacts) -> list[Check]:
    """All, in order: those of one model follow each other."""
    models = [
        Check("logits beside the reference", "1b", beside_reference),
        Check("graphs beside launches", "1b", graphs_beside_launches),
        Check("nothing is compiled once it is ready", "1b", nothing_compiled),
        Check("the same bits in any company", "1b-strict", in_any_company),
    ]

    def kernels(name: str) -> Callable[[Any, int], Finding]:
        return lambda _, seed: kernels_beside_reference(artifacts.open(name), seed)

    return models + [Check(f"kernels of {name}", None, kernels(name)) for name in artifacts.kernels]


class Models:
    """The model that was asked for last, loaded."""

    def __init__(self, artifacts: Artifacts, machine: Machine, **options: Any) -> None:
        self._artifacts, self._machine, self._options = artifacts, machine, options
        self._name = ""
        self._loaded: Loaded | None = None

    def get(self, name: str) -> Loaded:
        """Loads it in place of the one before."""
        if self._loaded is None or self._name != name:
            self.drop()
            self._loaded, self._name = self._machine.load(self._artifacts.open(name), **self._options), name
        return self._loaded

    def drop(self) -> None:
        """Frees its memory."""
        self._loaded = None
        self._machine.free()


def run_quick(
    artifacts: Artifacts,
    machine: Machine,
    results: Results,
    *,
    seed: int,
    budget_s: float,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Runs the checks; how many failed or were left out for want of time."""
    models, ends, failed = Models(artifacts, machine, num_blocks=POOL_BLOCKS), clock() + budget_s, 0
    for check in checks(artifacts):
        began = clock()
        line: Line = {"name": check.name, "model": check.model or ""}
        if began + CHECK_S > ends:
            line |= {"ok": False, "detail": "left out: no time was left"}
        else:
            line |= _outcome(check, models, seed)
            line["seconds"] = round(clock() - began, 1)
        failed += not line["ok"]
        results.add(line)
        say(f"{'ok    ' if line['ok'] else 'FAILED'} {check.name}: {line['detail']}")
    return failed


def _outcome(check: Check, models: Models, seed: int) -> Line:
    try:
        if check.model is None:
            models.drop()
        finding = check.run(models.get(check.model) if check.model else None, seed)
    except PagecError as error:
        return {"ok": False, "detail": str(error)}
    except Exception as error:  # one check's defect leaves the others to be run
        return {"ok": False, "detail": f"{type(error).__name__}: {error}"}
    return {"ok": not finding.wrong, "detail": "; ".join(finding.wrong) or finding.detail}


COLUMNS: Final[dict[str, Callable[[Line], str]]] = {
    "check": lambda line: line["name"],
    "model": lambda line: line["model"],
    "": lambda line: "ok" if line["ok"] else "**failed**",
    "seconds": lambda line: f"{line.get('seconds', 0):g}",
    "what was found": lambda line: line["detail"].replace("\n", " "),
}
