"""Many clients at once, some of them rude, for as long as one likes: nothing may break, leak or stay behind.

    python tests/soak.py --seconds 300 --clients 200

starts `pagec serve` on a small model with a small KV pool and a short queue. Each client makes one request
after the other: it streams to the end, leaves while its answer comes or before it begins, breaks off in the
middle of its body, sends what is no JSON, no HTTP, or no valid value. Meanwhile schemathesis makes up
requests from the server's own OpenAPI document. What must hold:

    - every answer is 200, an error of the client's own (4xx), or 429 with Retry-After; a stream that is read
      to its end is complete
    - then no request is left, and no block is in use
    - the memory of both processes is no larger in the last third of the time than in the second
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from support.serving import RunningServer, served_artifact

# Fewer sequences may be open than there are clients, so that some are refused however fast the machine is.
SERVER_OPTIONS: Final = ("--kv-bytes", str(4 << 20), "--max-seqs", "64", "--max-queue", "32")
# What freed memory an allocator keeps, beside a leak that would show in any longer run.
SLACK_BYTES: Final = 24 << 20
PATIENCE_S: Final = 60


@dataclass
class Report:
    """What has happened. `faults`: what must not."""

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)  # front, engine
    schemathesis: str = ""
    left: dict[str, Any] = field(default_factory=dict)

    def fault(self, text: str) -> None:
        """Keeps the first few; the rest is more of the same."""
        if len(self.faults) < 20:
            self.faults.append(text)

    def growth_bytes(self) -> list[int]:
        """By how much each process was larger in the last third of the time than in the second."""
        third = len(self.memory) // 3
        second, last = self.memory[third : 2 * third], self.memory[2 * third :]
        if not second:
            return [0, 0]
        return [
            round(statistics.median(m[i] for m in last) - statistics.median(m[i] for m in second))
            for i in range(2)
        ]

    def check(self) -> None:
        """AssertionError if anything is not as it must be."""
        assert not self.faults, self.faults
        assert self.answers["200 stream"] > 0
        assert self.left == {"running": 0, "waiting": 0, "used": 0}, self.left
        growth = self.growth_bytes()
        assert max(growth) <= SLACK_BYTES, f"memory has grown by {growth} bytes"


class Client:
    """One client. HTTP by hand: a library would not let it be rude."""

    def __init__(self, port: int, seed: int, report: Report) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self._report = report

    async def run(self, until: float) -> None:
        """One request after the other."""
        ways: list[Callable[[], Awaitable[None]]] = [
            *[self.stream] * 6,
            *[self.leave_a_stream] * 4,
            self.leave_at_once,
            self.break_off_the_body,
            self.ask_without_stream,
            self.ask_nonsense,
            self.send_garbage,
        ]
        while time.monotonic() < until:
            try:
                await self._rng.choice(ways)()
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self._report.fault(f"the server broke off: {error!r}")

    def _body(self, **more: Any) -> dict[str, Any]:
        rng = self._rng
        shared = "The quick brown fox jumps over the lazy dog. " * rng.choice([0, 1, 3])
        body: dict[str, Any] = {
            "prompt": shared + "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 80))),
            "max_tokens": rng.randrange(1, 60),
            "temperature": rng.choice([0, 0.7, 1.5]),
            "ignore_eos": True,
        }
        extras: list[dict[str, Any]] = [
            {},
            {"n": rng.randrange(1, 4)},
            {"stop": rng.choice(["a", ["e", "xyz"]])},
            {"logprobs": rng.randrange(4)},
            {"top_k": 5, "repetition_penalty": 1.2, "seed": rng.randrange(100)},
            {"priority": rng.randrange(3)},
            {"structured_outputs": {"regex": "[a-f]{3,9}"}},
        ]
        return {**body, **rng.choice(extras), **more}

    async def _open(self, body: bytes, length: int | None = None) -> tuple[Any, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {length or len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        return reader, writer

    async def _status(self, reader: asyncio.StreamReader, expected: str) -> int:
        """The status, counted; anything but what may come is a fault. Who is refused waits a moment."""
        status = int((await reader.readline()).split()[1])
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        is_refusal = status == 429 and b"retry-after" in headers
        if not is_refusal and str(status) not in expected.split():
            self._report.fault(f"{status} in place of {expected}: {(await reader.read())[:300]!r}")
        if is_refusal:
            await asyncio.sleep(self._rng.random())
        return status

    async def stream(self) -> None:
        reader, writer = await self._open(json.dumps(self._body(stream=True)).encode())
        status = await self._status(reader, "200")
        data = await reader.read()
        if status == 200 and b"data: [DONE]" not in data:
            self._report.fault(f"a stream without an end: {data[-200:]!r}")
        self._report.answers[f"{status} stream"] += 1
        writer.close()

    async def leave_a_stream(self) -> None:
        reader, writer = await self._open(json.dumps(self._body(stream=True)).encode())
        if await self._status(reader, "200") == 200:
            for _ in range(self._rng.randrange(30)):
                if not await reader.readline():
                    break
        self._report.answers["left a stream"] += 1
        writer.close()

    async def leave_at_once(self) -> None:
        _, writer = await self._open(json.dumps(self._body(stream=self._rng.random() < 0.5)).encode())
        await writer.drain()
        writer.close()
        self._report.answers["left at once"] += 1

    async def break_off_the_body(self) -> None:
        body = json.dumps(self._body()).encode()
        _, writer = await self._open(body[: len(body) // 2], len(body))
        await writer.drain()
        writer.close()
        self._report.answers["broke off"] += 1

    async def ask_without_stream(self) -> None:
        reader, writer = await self._open(json.dumps(self._body()).encode())
        status = await self._status(reader, "200")
        await reader.read()
        self._report.answers[f"{status} whole"] += 1
        writer.close()

    async def ask_nonsense(self) -> None:
        wrong: dict[str, Any] = self._rng.choice(
            [
                {"temperature": -1},
                {"n": 10**6},
                {"max_tokens": 10**9},
                {"logit_bias": {"99999999": 1}},
                {"prompt": []},
                {"prompt": [-1]},
                {"stop": ""},
                {"structured_outputs": {"regex": "["}},
                {"no_such_field": 1},
            ]
        )
        reader, writer = await self._open(json.dumps({**self._body(), **wrong}).encode())
        status = await self._status(reader, "400")
        await reader.read()
        self._report.answers[f"{status} nonsense"] += 1
        writer.close()

    async def send_garbage(self) -> None:
        data = self._rng.randbytes(self._rng.randrange(1, 200))
        if self._rng.random() < 0.5:
            reader, writer = await self._open(data)
            status = await self._status(reader, "400")
            await reader.read()
            self._report.answers[f"{status} no JSON"] += 1
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(data + b"\r\n\r\n")
            await writer.drain()
            writer.write_eof()
            await reader.read()
            self._report.answers["no HTTP"] += 1
        writer.close()


def resident_bytes(pid: int) -> int:
    """Memory of a process, without what it maps from files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no process {pid}")


async def _watch(server: RunningServer, report: Report, until: float) -> None:
    while time.monotonic() < until:
        report.memory.append((resident_bytes(server.process.pid), resident_bytes(server.engine_pid)))
        await asyncio.sleep(0.5)


async def _fuzz(server: RunningServer, report: Report, seconds: float) -> None:
    """schemathesis, for as long as the others run."""
    command = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json"),
        *("--checks", "not_a_server_error", "--phases", "fuzzing", "--max-examples", "1000"),
        *("--exclude-path", "/stats/stream", "--max-time", str(max(int(seconds), 1))),
        *("--suppress-health-check", "all", "--request-timeout", "60", "--seed", "0"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tempfile.gettempdir()
    )
    output, _ = await process.communicate()
    report.schemathesis = output.decode(errors="replace")
    if process.returncode != 0:
        report.fault(f"schemathesis: {report.schemathesis[-3000:]}")


async def soak(server: RunningServer, seconds: float, clients: int) -> Report:
    """Runs the clients; what has come of it."""
    report = Report()
    until = time.monotonic() + seconds
    await asyncio.gather(
        _watch(server, report, until),
        _fuzz(server, report, 0.8 * seconds),
        *(Client(server.port, seed, report).run(until) for seed in range(clients)),
    )
    for _ in range(PATIENCE_S * 10):
        stats = server.get("/stats")
        left = {name: len(stats[name]) for name in ("running", "waiting")}
        report.left = {**left, "used": stats["blocks"]["used"]}
        if not any(report.left.values()):
            break
        await asyncio.sleep(0.1)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=200)
    options = parser.parse_args()
    os.environ.setdefault("PAGEC_CACHE", str(Path(__file__).resolve().parent.parent / "build" / "cache"))
    with tempfile.TemporaryDirectory() as directory:
        artifact = served_artifact(Path(directory) / "artifact")
        with RunningServer(artifact, *SERVER_OPTIONS) as server:
            report = asyncio.run(soak(server, options.seconds, options.clients))
    figures = {
        "answers": dict(sorted(report.answers.items())),
        "growth_bytes": report.growth_bytes(),
        "left": report.left,
        "schemathesis": report.schemathesis.splitlines()[-12:],
        "faults": report.faults,
    }
    json.dump(figures, sys.stdout, indent=2)
    print()
    report.check()


if __name__ == "__main__":
    main()
