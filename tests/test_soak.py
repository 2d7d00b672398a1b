"""Half a minute of many clients, some of them rude, and of made-up requests: see soak.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from soak import SERVER_OPTIONS, soak
from support.serving import RunningServer, served_artifact


@pytest.mark.slow
def test_nothing_breaks_leaks_or_stays_behind(tmp_path: Path) -> None:
    artifact = served_artifact(tmp_path / "artifact")
    with RunningServer(artifact, *SERVER_OPTIONS) as server:
        report = asyncio.run(soak(server, 30.0, 200))
    report.check()
    assert report.answers["429 stream"] > 0, "the queue was never full"
    assert "generated" in report.schemathesis
