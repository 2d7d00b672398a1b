"""Requests of a busy server, run again alone by `pagec replay`: every bit is the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.serving import RunningServer

from pagec.compiler.artifact import MANIFEST
from pagec.compiler.errors import PagecError
from pagec.runtime.cli.replay import replay
from pagec.runtime.server.record import find_records

BODIES: list[dict[str, Any]] = [
    {"prompt": "greedy", "temperature": 0},
    {"prompt": "no seed is given"},
    {"prompt": "three of them", "n": 3, "logprobs": 3, "top_p": 0.9},
    {"prompt": ["two prompts", "in one request"], "repetition_penalty": 1.2},
    {"prompt": "held by a grammar", "structured_outputs": {"regex": "[a-z]{10,20}"}},
    {"prompt": "beams", "use_beam_search": True, "n": 2, "beam_width": 3},
    {
        "prompt": "words",
        "bad_words": ["a", "b"],
        "logit_bias": {"70": 5},
        "stop_token_ids": [9],
        "logprobs": 0,
    },
    {"prompt": "a stop", "allowed_token_ids": list(range(60, 90)), "stop": "e", "max_tokens": 200},
]


def pagec(*words: str | Path, code: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagec.runtime.cli", "replay", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


@pytest.fixture(scope="module")
def recorded(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What a server records that does all this at once, and the ids of its answers."""
    file = tmp_path_factory.mktemp("record") / "requests.jsonl"
    ids = [""] * len(BODIES)
    with RunningServer(artifact, "--record", str(file), "--prefill-chunk", "16") as server:

        def ask(number: int) -> None:
            ids[number] = server.post("/v1/completions", {"max_tokens": 24, **BODIES[number]})["id"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(BODIES))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.refused("/v1/completions", {"prompt": ""})
    return file, ids


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def changed(file: Path, path: Path, change: Mapping[str, Any], id: str) -> Path:
    """The records with another first choice for one of them."""
    lines = lines_of(file)
    for line in lines:
        if line["id"] == id:
            line["choices"][0] = {**line["choices"][0], **change}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_a_request_is_reproduced(recorded: tuple[Path, list[str]], artifact: Path, number: int) -> None:
    file, ids = recorded
    comparisons = replay(find_records(file, ids[number]), artifact, threads=1)
    assert len(comparisons) == (2 if isinstance(BODIES[number]["prompt"], list) else 1)
    assert [one.differences for one in comparisons] == [()] * len(comparisons)
    assert all(one.num_tokens > 0 for one in comparisons)


def test_the_command(recorded: tuple[Path, list[str]]) -> None:
    file, ids = recorded
    found = json.loads(pagec(file, "--list", "--json", code=0).stdout)
    assert len(found) == len(BODIES) + 1  # nothing of what was refused
    assert all(line["output_tokens"] > 0 for line in found)
    assert "every bit the same" in pagec(file, ids[0], code=0).stdout
    (both, _) = json.loads(pagec(file, ids[3], "--json", code=0).stdout)
    assert both["equal"] is True


def test_what_differs_is_shown(recorded: tuple[Path, list[str]], artifact: Path, tmp_path: Path) -> None:
    file, ids = recorded
    choice = next(line for line in lines_of(file) if line["id"] == ids[2])["choices"][0]
    tokens = [*choice["token_ids"]]
    tokens[3] = (tokens[3] + 1) % 256
    other = changed(file, tmp_path / "tokens", {"token_ids": tokens}, ids[2])
    done = pagec(other, ids[2], code=1)
    assert f"differs in choice 0 at token 3: the token was {tokens[3]}" in done.stdout
    logprobs = choice["logprobs"]
    logprobs[1]["own"][0] *= 1 + 2**-50
    other = changed(file, tmp_path / "logprobs", {"logprobs": logprobs}, ids[2])
    (found,) = replay(find_records(other, ids[2]), artifact, threads=1)
    assert found.describe().startswith(f"{ids[2]}: differs in choice 0 at token 1: the log probability")


def test_what_cannot_be_replayed(recorded: tuple[Path, list[str]], artifact: Path, tmp_path: Path) -> None:
    file, ids = recorded
    (tmp_path / "broken").write_text('{"id": 1}\n')
    for where, id, words in (
        (file, "nothing", "has no request nothing"),
        (tmp_path / "none", "x", "cannot be read"),
        (tmp_path / "broken", "x", "broken:1: lacks choices"),
    ):
        with pytest.raises(PagecError, match=words):
            find_records(where, id)
    other = tmp_path / "other"
    shutil.copytree(artifact, other)
    manifest = json.loads((other / MANIFEST).read_text())
    (other / MANIFEST).write_text(json.dumps({**manifest, "model": "another"}))
    with pytest.raises(PagecError, match="not the artifact that answered"):
        replay(find_records(file, ids[0]), other, threads=1)


def test_a_gpu_without_strict_mode_is_refused(
    recorded: tuple[Path, list[str]], artifact: Path, tmp_path: Path
) -> None:
    file, ids = recorded
    other = tmp_path / "gpu"
    shutil.copytree(artifact, other)
    manifest = json.loads((other / MANIFEST).read_text())
    manifest["target"] = {"name": "h200", "sm": 90}
    (other / MANIFEST).write_text(json.dumps(manifest))
    done = pagec(file, ids[0], "--model", other, code=2)
    assert "without the strict mode" in done.stderr
    assert "depend on how many requests run" in done.stderr.replace("\n", " ")
