"""What `pagec tune` shows people: choices, and how they compare with kernels that others tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from pagec.runtime.cli.console import print_table, stderr

if TYPE_CHECKING:
    from pagec.autotune.database import Database
    from pagec.autotune.prediction import Candidate
    from pagec.autotune.table import Entry

# The head size and group of Llama.
COMPARED: Final = "d128_g4"
# What goes without saying.
PLAIN: Final = {"tma": 0, "splits": 1, "group_m": 1, "split": 0}


def mode_of(strict: bool) -> str:
    """The set of a table's choices that --strict stands for."""
    return "strict" if strict else "default"


def say(notices: Sequence[str]) -> None:
    """On stderr."""
    for notice in notices:
        stderr().print(f"[yellow]{notice}[/]", soft_wrap=True)


def rows_of(entries: Any, mode: str) -> list[tuple[str, ...]]:
    """Cells: shape, rows, knobs, time, baseline, roofline, bound, origin."""
    return [_row(key, entry, choice) for key, entry in entries for choice in entry.sets[mode]]


def _row(key: str, entry: Entry, choice: Any) -> tuple[str, ...]:
    least = choice.facts.get("roofline_us")
    return (
        key,
        str(choice.rows or "any"),
        " ".join(f"{knob} {value}" for knob, value in choice.point.items() if value != PLAIN.get(knob)),
        _number(choice.us),
        "does not fit" if choice.baseline_us is None else _number(choice.baseline_us),
        f"{100 * least / choice.us:.0f} %" if least else "",
        str(choice.facts.get("bound", "")),
        str(choice.facts.get("origin", entry.origin)),
    )


def print_entries(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    """Choices as a grid."""
    from rich.table import Table as Grid

    grid = Grid("shape", "rows", "chosen", "us", "untuned", "of roof", "bound by", "", title=title)
    for column in (grid.columns[0], grid.columns[2], *grid.columns[-2:]):
        column.no_wrap = True
    for column in grid.columns[3:6]:
        column.justify = "right"
    for row in rows:
        grid.add_row(*row)
    print_table(grid)


def print_public(name: str) -> None:
    """The model's best tile of dense causal prefill beside that of a kernel tuned on the device."""
    from rich.table import Table as Grid

    from pagec.autotune.compare import against_public
    from pagec.compiler.backends.targets import load_cuda_target

    grid = Grid(
        "head size",
        "best",
        "us",
        "public tile",
        "us",
        "best / public",
        title=f"dense causal prefill on {name}, 4,096 tokens, 32 heads, by the model's own figures",
    )
    for one in against_public(load_cuda_target(name)):
        grid.add_row(
            str(one.head_dim),
            one.best_tile,
            _number(one.best_us),
            one.public_tile,
            _number(one.public_us),
            f"{one.best_us / one.public_us:.3f}",
        )
    print_table(grid)


def print_decode(database: Database) -> None:
    """Chosen points of paged decoding beside tiles of 64 keys in blocks of 16."""
    from rich.table import Table as Grid

    from pagec.autotune.compare import against_small_blocks
    from pagec.compiler.backends.targets import load_cuda_target

    entry = database.find("attention_decode", COMPARED)
    if entry is None:
        return
    title = f"paged decoding on {database.target}, {COMPARED}: chosen, and the best of block 16, BN 64"
    grid = Grid(
        "sequences", "context", "chosen", "us", "bound by", "block 16, BN 64", "us", "bound by", title=title
    )
    for one in against_small_blocks(load_cuda_target(database.target), entry):
        grid.add_row(
            str(one.problem.sequences),
            str(one.problem.context),
            *(cell for found in (one.chosen, one.small) for cell in _cells(found)),
        )
    print_table(grid)


def _cells(found: Candidate) -> tuple[str, str, str]:
    assert found.prediction is not None
    knobs = " ".join(
        f"{knob} {found.point[knob]}" for knob in ("BN", "block_size", "split", "warps", "stages")
    )
    return knobs, _number(found.us), found.prediction.bound


def _number(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"
