"""The tuned choices that a compilation takes: the user's tables, then those that pagec ships."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagec.runtime.cli.console import stderr

if TYPE_CHECKING:
    from pagec.compiler.backends.cuda.knobs import Tuned


def tuned_choices(target: str, strict: bool) -> Tuned:
    """For a GPU; nothing for another target. Says on stderr which tables are stale."""
    from pagec.autotune.database import Database
    from pagec.autotune.space import SPACES
    from pagec.compiler.backends.targets import GPUS
    from pagec.compiler.driver import cache_root

    if target not in GPUS:
        return {}
    database = Database(target, "cuda", cache=cache_root())
    found = database.choices(SPACES, "strict" if strict else "default")
    for notice in database.notices:
        stderr().print(f"[yellow]{notice}[/]", soft_wrap=True)
    return found
