"""`pagec top`: a server's engine, live in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pagec.compiler.errors import PagecError
from pagec.runtime.cli.console import JsonFlag, print_json
from pagec.runtime.cli.remote import ApiKey, Remote

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

DEFAULT_URL: Final = "http://127.0.0.1:8000"
RETRY_S: Final = 1.0
BARS: Final = "▁▂▃▄▅▆▇█"
MAP_ROWS: Final = 4
# The pool's states, the busiest first: a cell that stands for several blocks shows the busiest of them.
STYLES: Final = {"s": "yellow", "u": "blue", "c": "cyan", "#": "white", ".": "bright_black"}
GLYPHS: Final = {"s": "▓", "u": "█", "c": "▒", "#": "#", ".": "·"}  # for eyes and pipes without colours
STATES: Final = {"shared": "s", "used": "u", "cached": "c", "free": "."}
NUM_FIXED_LINES: Final = 11  # of a frame without its requests


def command(
    url: Annotated[str, typer.Argument(help="The server.")] = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    api_key: ApiKey = None,
    as_json: JsonFlag = False,
) -> None:
    """Watch a server: requests, tokens per second, KV blocks, step times. Ctrl-C ends it.

    Without a terminal one frame is printed. --json prints a line for each update, with --once a single one.
    """
    server = Remote(url, api_key)
    try:
        if as_json:
            _print_lines(server, once)
        elif once or not sys.stdout.isatty():
            _print_frame(server)
        else:
            _watch(server)
    except KeyboardInterrupt:
        return


def _print_lines(server: Remote, once: bool) -> None:
    if once:
        print_json(server.get("/stats"))
        return
    for stats in server.events("/stats/stream"):
        print_json(stats)
        sys.stdout.flush()


def _print_frame(server: Remote) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(frame(server.get("/stats"), console.width, None))


def _watch(server: Remote) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for stats in _updates(server):
            shown = stats if isinstance(stats, str) else frame(stats, console.width, console.height)
            live.update(shown, refresh=True)


def _updates(server: Remote) -> Iterator[Any]:
    """Stats for ever; while there are none the reason, as text."""
    while True:
        try:
            yield from server.events("/stats/stream")
            yield f"{server.url}: connection lost"
        except PagecError as error:
            yield str(error)
        time.sleep(RETRY_S)


# --------------------------------------------------------------------------------------- frames


def frame(stats: Mapping[str, Any], width: int, height: int | None) -> RenderableType:
    """One picture of the engine. `height` None: as many lines as there are requests."""
    from rich.console import Group
    from rich.text import Text

    rows = None if height is None else max(height - NUM_FIXED_LINES, 1)
    head = Text.assemble((str(stats["model"]), "bold"), (f"   up {_span(stats['uptime_s'])}", "dim"))
    return Group(
        head,
        _rates(stats),
        _steps(stats["step_ms"], width),
        *_blocks(stats["blocks"], width),
        _requests(stats, rows),
    )


def _rates(stats: Mapping[str, Any]) -> Text:
    from rich.text import Text

    figures = (
        (f"{stats['tokens_per_s']:.1f}", "tokens/s"),
        (f"{stats['prompt_tokens_per_s']:.0f}", "prompt/s"),
        (f"{stats['hit_rate']:.1%}", "cache hits"),
        (f"{len(stats['running'])}", "running"),
        (f"{len(stats['waiting'])}", "waiting"),
        (f"{stats['preemptions']}", "preemptions"),
    )
    parts = (
        (value, "bold") if i == 0 else (f" {value}  ", "dim") for f in figures for i, value in enumerate(f)
    )
    return Text.assemble(*parts)


def _steps(steps: Mapping[str, Any], width: int) -> Text:
    from rich.text import Text

    if not steps["recent"]:
        return Text("steps: none yet", style="dim")
    words = f"steps: last {steps['last']:.2f} ms, mean {steps['mean']:.2f} ms, p99 {steps['p99']:.2f} ms  "
    return Text.assemble((words, "dim"), (sparkline(steps["recent"], max(width - len(words), 8)), "blue"))


def sparkline(values: list[float], width: int) -> str:
    """The latest values as bars of eighths."""
    shown = values[-width:]
    most = max(*shown, 1e-9) if shown else 1.0
    return "".join(BARS[min(int(value / most * len(BARS)), len(BARS) - 1)] for value in shown)


def _blocks(blocks: Mapping[str, Any], width: int) -> list[Text]:
    from rich.text import Text

    parts: list[tuple[str, str]] = [(f"{blocks['total']} blocks of {blocks['block_size']} tokens: ", "dim")]
    for name, state in STATES.items():
        parts += [(f"{GLYPHS[state]} ", STYLES[state]), (f"{name} {blocks[name]}  ", "dim")]
    rows = condensed(blocks["map"], width, MAP_ROWS)
    return [
        Text.assemble(*parts),
        *(Text.assemble(*((GLYPHS[state], STYLES[state]) for state in row)) for row in rows),
    ]


def condensed(states: str, width: int, rows: int) -> list[str]:
    """The pool's map in a few rows: each character is the busiest state of as many blocks as it must be."""
    share = -(-len(states) // (width * rows))
    order = list(STYLES)
    cells = [min(states[i : i + share], key=order.index) for i in range(0, len(states), share)]
    return ["".join(cells[i : i + width]) for i in range(0, len(cells), width)]


def _requests(stats: Mapping[str, Any], rows: int | None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("request", "state", "prompt", "output", "blocks"):
        table.add_column(name, justify="left" if name in ("request", "state") else "right", no_wrap=True)
    lines = [
        (r["id"], "running", str(r["prompt_tokens"]), str(r["output_tokens"]), str(r["blocks"]))
        for r in stats["running"]
    ] + [
        (r["id"], f"waiting {r['waited_s']:.1f} s", str(r["prompt_tokens"]), "", "") for r in stats["waiting"]
    ]
    shown = lines if rows is None or len(lines) <= rows else lines[: rows - 1]
    for line in shown:
        table.add_row(*line)
    if len(shown) < len(lines):
        table.add_row(f"and {len(lines) - len(shown)} more")
    return table


def _span(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((i for i, (value, _) in enumerate(parts) if value), len(parts) - 1)
    return " ".join(f"{value} {unit}" for value, unit in parts[first : first + 2])
