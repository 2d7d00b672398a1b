"""`pagec serve`: its options, from the command line and a file, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.serving import RunningServer

from pagec.compiler.errors import PagecError
from pagec.runtime.cli.serve import read_config


def refused(*words: str | Path, env: Mapping[str, str] | None = None) -> str:
    """What is said on stderr, in one line."""
    command = [sys.executable, "-m", "pagec.runtime.cli", "serve", *map(str, words)]
    env = {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_options_from_a_file_and_the_command_line_wins(byte_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "served-model-name: [first, second]\napi_key: [secret]\nmax-seqs: 2\nport: 1\nmax-queue: 0\n"
    )
    with RunningServer(byte_artifact, "--config", str(file), "--max-queue", "3") as server:
        assert server.port > 1  # --port 0 of the command line
        headers = {"authorization": "Bearer secret"}
        assert server.request("GET", "/v1/models")[0] == 401
        status, models, _ = server.request("GET", "/v1/models", headers=headers)
        assert status == 200
        assert [model["id"] for model in models["data"]] == ["first", "second"]


def test_an_unknown_option_in_a_file(byte_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-que: 5\n")
    said = refused(byte_artifact, "--config", file)
    assert "max-que is no option of serve" in said
    assert "did you mean max_queue" in said


def test_a_single_value_of_an_option_that_may_be_repeated(byte_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: secret\nserved-model-name: mine\n")
    with RunningServer(byte_artifact, "--config", str(file)) as server:
        assert server.request("GET", "/v1/models")[0] == 401
        headers = {"authorization": "Bearer secret"}
        _, models, _ = server.request("GET", "/v1/models", headers=headers)
        assert [model["id"] for model in models["data"]] == ["mine"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: x", "port: 'x' is not a valid int"),
        ("max-queue: -1", "max-queue: -1 is not in the range x>=0"),
        ("model: other", "model is no option of serve"),
        ("api-key: ''", "a key is empty"),
        ("api-key: ['']", "a key is empty"),
        ("api-key: [good, '']", "a key is empty"),
    ],
)
def test_values_in_a_file_that_are_wrong(byte_artifact: Path, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text + "\n")
    said = refused(byte_artifact, "--config", file)
    assert words in said
    if "empty" not in words:
        assert "serve.yaml" in said


def test_an_empty_key_does_not_open_the_server(byte_artifact: Path) -> None:
    assert "--api-key: a key is empty" in refused(byte_artifact, "--api-key", "")
    for value in ("", " ", ","):
        said = refused(byte_artifact, "--api-key", "good", env={"PAGEC_API_KEY": value})
        assert "PAGEC_API_KEY: a key is empty" in said


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words"])
def test_a_file_that_is_no_map(tmp_path: Path, text: str) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(PagecError):
        read_config(tmp_path / "serve.yaml", {"a"})


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("# nothing\n")
    assert read_config(tmp_path / "serve.yaml", {"a"}) == {}


def test_what_is_said_when_it_is_ready(byte_artifact: Path) -> None:
    command = [sys.executable, "-m", "pagec.runtime.cli", "serve", str(byte_artifact), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--verbose"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("small is ready: http://127.0.0.1:")
    process.terminate()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "KV pool" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "best"), "there is no policy best"),
        (("--kv-bytes", "5"), "KV pool"),
        (("--tool-format", "morse"), "'morse' is none of"),
        (("--record", "/nowhere/at/all"), "cannot be written"),
        (("--host", "not-a-host.invalid"), "cannot listen"),
    ],
)
def test_what_cannot_be_served(byte_artifact: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused(byte_artifact, "--port", "0", *words)


def test_a_port_that_is_taken(server: RunningServer, byte_artifact: Path) -> None:
    assert f"cannot listen on 127.0.0.1:{server.port}" in refused(byte_artifact, "--port", str(server.port))


def test_a_directory_without_artifact(tmp_path: Path, byte_artifact: Path) -> None:
    for name in ("manifest.json", "program.json"):
        (tmp_path / name).write_bytes((byte_artifact / name).read_bytes())
    said = refused(tmp_path, "--port", "0")
    assert "the file is missing" in said or "has no tokenizer" in said
    assert json.loads((byte_artifact / "manifest.json").read_text())["model"] == "small"


def test_an_install_without_the_server_says_what_it_needs(byte_artifact: Path) -> None:
    code = f"""
import sys
sys.modules["uvloop"] = None
sys.argv = ["pagec", "serve", {str(byte_artifact)!r}]
from pagec.runtime.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pagec[serve]" in done.stderr
    assert "Traceback" not in done.stderr
