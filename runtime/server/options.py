"""What a server is started with, and where it can be reached when it is ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagec.runtime.server.limits import RequestLimits
from pagec.runtime.server.messages import Ready


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """`engine`: keywords of Engine. Port 0: any that is free; `grpc_port` None: no gRPC. `names`: those that
    requests may use for the model; none: its own. With `api_keys` one of them must be shown. `tool_format`:
    see tools.make_tool_format. `max_queue`: see Service. `drain_s`: how long running requests may take at
    the end. `record`: see record.py."""

    artifact: Path
    engine: dict[str, Any]
    host: str
    port: int
    grpc_port: int | None
    names: tuple[str, ...]
    api_keys: tuple[str, ...]
    tool_format: str | None
    max_queue: int
    drain_s: float
    record: Path | None
    limits: RequestLimits = field(default_factory=RequestLimits)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server that is ready can be reached."""

    host: str
    port: int
    grpc_port: int | None
    engine_pid: int
    engine: Ready

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
