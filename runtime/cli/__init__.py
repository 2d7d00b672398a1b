"""The `pagec` command. One file per command; what a command needs is imported when it runs."""

from __future__ import annotations


def main() -> None:
    """The console script's entry."""
    from pagec.runtime.cli.app import run

    run()
