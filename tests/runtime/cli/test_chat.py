"""`pagec chat` as a process: at a terminal and in a pipe, with a server and with a model of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.serving import RunningServer
from support.terminal import Terminal

COMMAND = [sys.executable, "-m", "pagec.runtime.cli", "chat"]
KEY = {"authorization": "Bearer secret"}
SAMPLING = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 12, "seed": 3}
OPTIONS = [word for name, value in SAMPLING.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def conversation(server: RunningServer, system: str | None, *questions: str) -> list[dict[str, str]]:
    """The same conversation by HTTP alone."""
    messages = [{"role": "system", "content": system}] if system else []
    for words in questions:
        messages.append({"role": "user", "content": words})
        body = {"messages": messages, **SAMPLING}
        status, answer, _ = server.request("POST", "/v1/chat/completions", body, KEY)
        assert status == 200, answer
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return messages


def run(*words: str, lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], input=lines, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("side", ["server", "model"])
def test_lines_from_a_pipe(server: RunningServer, byte_artifact: Path, side: str, tmp_path: Path) -> None:
    """Stdout has the answers alone, and both sides give the same ones."""
    where = [server.url, "--api-key", "secret"] if side == "server" else [str(byte_artifact)]
    file = tmp_path / "saved.json"
    lines = f"Hello\n\nAnd more?\n/save {file}\n"
    done = run(*where, *OPTIONS, "--system", "Be brief.", lines=lines)
    assert done.returncode == 0, done.stderr
    messages = conversation(server, "Be brief.", "Hello", "And more?")
    assert json.loads(file.read_text()) == {"messages": messages}
    assert done.stdout == "".join(f"{m['content']}\n" for m in messages if m["role"] == "assistant")


def test_commands(server: RunningServer, tmp_path: Path) -> None:
    """/reset and /system begin anew; /exit ends, whatever follows."""
    first, second, third = (tmp_path / f"{i}.json" for i in range(3))
    lines = ["One", "/reset", "Two", f"/save {first}", "/system Sing.", "Three", f"/save {second}"]
    lines += ["/system", f"/save {third}", "/help", "/exit", "Four"]
    done = run(server.url, "--api-key", "secret", *OPTIONS, lines="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert json.loads(first.read_text())["messages"] == conversation(server, None, "Two")
    assert json.loads(second.read_text())["messages"] == conversation(server, "Sing.", "Three")
    assert json.loads(third.read_text()) == {"messages": []}
    assert "/save FILE" in done.stderr


def test_errors_in_a_pipe_end_with_1(server: RunningServer, tmp_path: Path) -> None:
    """Each line gets its answer or its error, and a question that failed leaves no trace."""
    file = tmp_path / "saved.json"
    lines = f"/nonsense\n{'x' * 3000}\n/save {tmp_path}\nHello\n/save {file}\n"
    done = run(server.url, "--api-key", "secret", *OPTIONS, lines=lines)
    assert done.returncode == 1
    assert "/nonsense is no command" in done.stderr
    assert "2048" in done.stderr
    assert f"{tmp_path}: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(file.read_text())["messages"] == conversation(server, None, "Hello")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: no connection"),
        (["http://"], "is no URL"),
    ],
)
def test_no_server(words: list[str], message: str) -> None:
    done = run(*words, lines="Hello\n")
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_key(server: RunningServer) -> None:
    done = run(server.url, "--api-key", "wrong", lines="Hello\n")
    assert done.returncode == 1
    assert "a valid API key is needed" in done.stderr
    assert "PAGEC_API_KEY" in done.stderr


@pytest.mark.parametrize("side", ["server", "model"])
def test_a_terminal(server: RunningServer, byte_artifact: Path, side: str, tmp_path: Path) -> None:
    """Ctrl-C stops the answer and nothing else; what had come is part of the conversation."""
    where = server.url if side == "server" else str(byte_artifact)
    words = [*COMMAND, where, "--temperature", "0", "--max-tokens", "1900", "--kv-bytes", str(64 << 20)]
    with Terminal(words, env={"PAGEC_API_KEY": "secret"}, cwd=tmp_path) as terminal:
        terminal.expect("Ctrl-D ends")
        terminal.expect("> ")
        # At the prompt it only clears the line; Enter wakes readline if that came just before it waited.
        terminal.type("\x03\r")
        terminal.expect("> ")
        terminal.type("Tell me all.\r")
        terminal.expect("Tell me all.\r\n")
        assert terminal.read_some()
        terminal.type("\x03")
        terminal.expect("stopped")
        terminal.expect("> ")
        terminal.type("/save saved.json\r")
        terminal.expect("saved.json\r\n")
        terminal.expect("> ")
        question, answer = json.loads((tmp_path / "saved.json").read_text())["messages"]
        assert question == {"role": "user", "content": "Tell me all."}
        assert answer["content"]
        terminal.type("/what\r")
        terminal.expect("/what is no command")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    if side == "server":
        wait_until_idle(server)


def wait_until_idle(server: RunningServer) -> None:
    """The server has heard that the answer is not wanted."""
    for _ in range(500):
        _, stats, _ = server.request("GET", "/stats", headers=KEY)
        if not stats["running"]:
            return
    raise AssertionError(stats)
