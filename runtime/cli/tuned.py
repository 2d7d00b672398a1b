"""The tuned choices that a compilation takes: the user's tables, then those that pagec ships."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagec.runtime.cli.console import stderr

if TYPE_CHECKING:
    from pagec.autotune.database import Database
    from pagec.compiler.backends.tuned import Tuned


def open_database(target: str) -> Database:
    """The tables of a target, a GPU's or a CPU's; TargetError if there is no such target."""
    from pagec.autotune.database import Database
    from pagec.autotune.fingerprint import cpu_versions
    from pagec.compiler.backends.targets import load_target
    from pagec.compiler.driver import cache_root
    from pagec.compiler.target import CudaTarget
    from pagec.runtime.device.cpu import default_threads

    found, cache = load_target(target), cache_root()
    if isinstance(found, CudaTarget):
        return Database(found.name, "cuda", cache=cache)
    return Database(found.name, "cpu", cache=cache, versions=cpu_versions(default_threads()))


def kinds(backend: str) -> list[str]:
    """What is tuned, by template."""
    from pagec.autotune.space import SPACES
    from pagec.compiler.backends.cpu.knobs import KNOBS

    return list(KNOBS if backend == "cpu" else SPACES)


def tuned_choices(target: str, strict: bool = False) -> Tuned:
    """All that the tables have. Says on stderr which are stale: what those cover takes the defaults."""
    database = open_database(target)
    found = database.choices(kinds(database.backend), "strict" if strict else "default")
    for notice in database.notices:
        stderr().print(f"[yellow]{notice}[/]", soft_wrap=True)
    return found
