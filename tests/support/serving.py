"""`pagec serve` as a real process, on a small model with random weights whose tokens are bytes."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from pagec.compiler.artifact import MANIFEST, dump_json, file_entry
from support.small import small_artifact

EOS: Final = 0
TEMPLATE: Final = (
    "{% if tools %}<tool_call>{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
)
SPECIAL: Final = ("</s>", "<s>", "<pad>")  # in place of bytes that no UTF-8 has
BYTES: Final = [byte for byte in range(256) if byte < 0xFD]


def token_of(byte: int) -> int:
    """The token id of a byte."""
    return BYTES.index(byte) + len(SPECIAL)


def tokens_of(text: str) -> list[int]:
    """What the tokenizer makes of a text."""
    return [token_of(byte) for byte in text.encode()]


def bytes_of(tokens: list[int]) -> bytes:
    """The bytes that token ids stand for."""
    return bytes(BYTES[token - len(SPECIAL)] for token in tokens if token >= len(SPECIAL))


def served_artifact(path: Path) -> Path:
    """Writes the artifact: vocabulary 256, sequences of up to 2,048 tokens, token 0 ends a text."""
    shutil.copytree(small_artifact(), path)
    write_tokenizer(path / "tokenizer")
    manifest = json.loads((path / MANIFEST).read_text())
    for file in sorted((path / "tokenizer").iterdir()):
        manifest["files"][str(file.relative_to(path))] = file_entry(file)
    (path / MANIFEST).write_text(dump_json(manifest))
    return path


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    shown = _byte_characters()
    vocab = {name: i for i, name in enumerate([*SPECIAL, *(shown[byte] for byte in BYTES)])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "generation.json").write_text(json.dumps({"eos_token_ids": [EOS]}))


def _byte_characters() -> list[str]:
    """How byte-level BPE writes each byte: as itself if it is printed, else as a character from 256 on."""
    from tokenizers import pre_tokenizers

    printed = {ord(character) for character in pre_tokenizers.ByteLevel.alphabet() if ord(character) < 256}
    others = [byte for byte in range(256) if byte not in printed]
    return [chr(byte if byte in printed else 256 + others.index(byte)) for byte in range(256)]


class RunningServer:
    """A server that is ready; ends with the `with` block."""

    def __init__(self, artifact: Path, *options: str, env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "pagec.runtime.cli", "serve", str(artifact), "--port", "0", "--json"]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server has ended with {self.process.wait()}")
        self.ready: dict[str, Any] = json.loads(line)

    @property
    def url(self) -> str:
        return str(self.ready["ready"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        return int(self.ready["engine_pid"])

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Ends it at once; its exit code."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def connect(self) -> http.client.HTTPConnection:
        """A new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, body (parsed if it is JSON), headers."""
        connection = self.connect()
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kinds = {"content-type": "application/json"} if data is not None else {}
        connection.request(method, path, data, {**kinds, **(headers or {})})
        response = connection.getresponse()
        raw = response.read()
        found = dict(response.getheaders())
        connection.close()
        is_json = found.get("content-type", "").startswith("application/json")
        return response.status, json.loads(raw) if is_json else raw, found

    def get(self, path: str) -> Any:
        """The body of a GET that must go well."""
        status, body, _ = self.request("GET", path)
        assert status == 200, body
        return body

    def post(self, path: str, body: Any) -> Any:
        """The body of a POST that must go well."""
        status, found, _ = self.request("POST", path, body)
        assert status == 200, found
        return found

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a POST that must be refused with this status."""
        found, answer, _ = self.request("POST", path, body)
        assert found == status, answer
        error: dict[str, Any] = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def events(self, path: str, body: Any) -> Generator[Any, None, None]:
        """The server-sent events of a POST, the last of which must be [DONE]; may be left early."""
        last = None
        with closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            with connection.getresponse() as response:
                assert response.status == 200, response.read()
                for line in response:
                    if line.startswith(b"data: "):
                        last = line[6:].strip()
                        if last != b"[DONE]":
                            yield json.loads(last)
        assert last == b"[DONE]"
