"""gRPC against a live server, by a client that knows only what reflection tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.serving import RunningServer, bytes_of, token_of, tokens_of

from pagec.runtime.sampling.params import SamplingParams

DIRECTORY = Path(__file__).parents[3] / "runtime" / "server" / "grpc"
SERVICE = "pagec.v1.Pagec"
TIMEOUT_S = 60
GREEDY = {"temperature": 0.0, "max_tokens": 8}


class Client:
    """Calls methods by name with plain data. `metadata` goes with each call."""

    def __init__(self, port: int, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._metadata = metadata

    def methods(self) -> tuple[list[str], DescriptorPool]:
        """The services, and descriptions of all that they use."""
        database = ProtoReflectionDescriptorDatabase(self.channel)
        return sorted(database.get_services()), DescriptorPool(database)

    def start(self, name: str, request: Mapping[str, Any], service: str = SERVICE) -> Any:
        """A call that runs: a future, or an iterator of messages."""
        _, pool = self.methods()
        method = pool.FindServiceByName(service).FindMethodByName(name)
        kind = message_factory.GetMessageClass
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        call = make(
            f"/{service}/{name}",
            request_serializer=kind(method.input_type).SerializeToString,
            response_deserializer=kind(method.output_type).FromString,
        )
        message = ParseDict(request, kind(method.input_type)())
        if method.server_streaming:
            return call(message, timeout=TIMEOUT_S, metadata=self._metadata)
        return call.future(message, timeout=TIMEOUT_S, metadata=self._metadata)

    def call(self, name: str, request: Mapping[str, Any], service: str = SERVICE) -> dict[str, Any]:
        """The answer of a method that gives one."""
        return plain(self.start(name, request, service).result())

    def stream(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All answers of a stream."""
        return [plain(message) for message in self.start("GenerateStream", request)]

    def refusal(self, name: str, request: Mapping[str, Any]) -> Any:
        """The error that a method ends with."""
        with pytest.raises(grpc.RpcError) as caught:
            self.stream(request) if name == "GenerateStream" else self.call(name, request)
        return caught.value


def plain(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[RunningServer]:
    """Runs two sequences at once, and lets none wait."""
    options = ("--grpc-port", "0", "--max-seqs", "2", "--max-queue", "0", "--max-body-bytes", "65536")
    with RunningServer(artifact, *options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Client:
    return Client(server.ready["grpc_port"])


def test_reflection_lists_the_services(client: Client) -> None:
    services, pool = client.methods()
    assert services == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", SERVICE]
    methods = [method.name for method in pool.FindServiceByName(SERVICE).methods]
    assert methods == ["Generate", "GenerateStream", "Tokenize", "Detokenize", "GetModel"]


def test_every_sampling_parameter_can_be_given(client: Client) -> None:
    _, pool = client.methods()
    message = pool.FindMessageTypeByName("pagec.v1.SamplingParams")
    names = {field.name for field in fields(SamplingParams)}
    assert {field.name for field in message.fields} == names - {"logits_processors"}


def test_the_model(server: RunningServer, client: Client) -> None:
    model = client.call("GetModel", {})
    (listed,) = server.get("/v1/models")["data"]
    assert (model["name"], model["max_len"]) == (listed["id"], listed["max_model_len"])
    assert (model["vocab"], model["max_seqs"]) == (256, 2)
    assert model["digest"] == server.ready["digest"]
    assert model["num_blocks"] == server.get("/stats")["blocks"]["total"]


def test_text_and_tokens(server: RunningServer, client: Client) -> None:
    answer = client.call("Tokenize", {"text": "Ä b"})
    assert (answer["token_ids"], answer["max_len"]) == (tokens_of("Ä b"), 2048)
    assert client.call("Detokenize", {"token_ids": tokens_of("Ä b")})["text"] == "Ä b"
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    chat = client.call("Tokenize", {"chat": {"messages": messages}})["token_ids"]
    assert chat == server.post("/tokenize", {"messages": messages})["tokens"]


def test_greedy_text_is_that_of_http(server: RunningServer, client: Client) -> None:
    http = server.post("/v1/completions", {"prompt": "Once", **GREEDY})
    answer = client.call("Generate", {"text": "Once", "params": GREEDY})
    (choice,) = answer["choices"]
    assert choice["text"] == http["choices"][0]["text"]
    assert choice["finish_reason"] == f"FINISH_REASON_{http['choices'][0]['finish_reason'].upper()}"
    assert answer["usage"]["prompt_tokens"] == http["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert answer["timings"]["decode_s"] > 0
    ids = client.call("Generate", {"token_ids": {"ids": tokens_of("Once")}, "params": GREEDY})
    assert ids["choices"] == answer["choices"]


def test_a_chat_is_that_of_http(server: RunningServer, client: Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    http = server.post("/v1/chat/completions", {"messages": messages, **GREEDY})
    answer = client.call("Generate", {"chat": {"messages": messages}, "params": GREEDY})
    assert answer["choices"][0]["text"] == http["choices"][0]["message"]["content"]


def test_a_stream_adds_up_to_the_whole(client: Client) -> None:
    params = {"n": 2, "seed": -5, "max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1}
    request = {"text": "Once upon", "params": params}
    whole = client.call("Generate", request)
    first, *between, last = client.stream(request)
    assert first["id"]
    assert first["id"] != whole["id"]
    assert first["seed"] == whole["seed"] == "-5"
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert len(whole["prompt_logprobs"]) == len("Once upon")
    assert "own" not in whole["prompt_logprobs"][0]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert "timings" in last
    pieces = [choice for message in (first, *between) for choice in message["choices"]]
    for choice in whole["choices"]:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [token for piece in mine for token in piece["token_ids"]] == choice["token_ids"]
        assert [place for piece in mine for place in piece["logprobs"]] == choice["logprobs"]
        assert [piece["finish_reason"] for piece in mine][-1] == choice["finish_reason"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]


def test_log_probabilities_name_their_tokens(client: Client) -> None:
    params = {**GREEDY, "logprobs": 3}
    (choice,) = client.call("Generate", {"text": "Once", "params": params})["choices"]
    assert len(choice["logprobs"]) == len(choice["token_ids"])
    for token, place in zip(choice["token_ids"], choice["logprobs"], strict=True):
        assert place["own"]["token_id"] == place["top"][0]["token_id"] == token
        assert place["own"]["rank"] == 1
        assert len(place["top"]) == 3
        assert place["top"][0]["logprob"] >= place["top"][1]["logprob"] >= place["top"][2]["logprob"]


def test_a_drawn_seed_is_told_and_draws_the_same_again(client: Client) -> None:
    params = {"max_tokens": 16, "temperature": 1.5}
    first = client.call("Generate", {"text": "x", "params": params})
    again = client.call("Generate", {"text": "x", "params": {**params, "seed": first["seed"]}})
    assert again["choices"] == first["choices"]


def test_what_ends_a_text(client: Client) -> None:
    (long,) = client.call("Generate", {"text": "Once", "params": GREEDY})["choices"]
    token = long["token_ids"][2]
    (choice,) = client.call("Generate", {"text": "Once", "params": {**GREEDY, "stop_token_ids": [token]}})[
        "choices"
    ]
    assert (choice["finish_reason"], choice["stop_token_id"]) == ("FINISH_REASON_STOP", token)
    stop = {"structured_outputs": {"regex": "abcdef"}, "stop": ["de"]}
    (choice,) = client.call("Generate", {"text": "Once", "params": {**GREEDY, **stop}})["choices"]
    assert (choice["text"], choice["stop_text"]) == ("abc", "de")


def test_other_parameters_reach_the_engine(client: Client) -> None:
    def text(**params: Any) -> str:
        (choice,) = client.call("Generate", {"text": "Go: ", "params": {**GREEDY, **params}})["choices"]
        return str(choice["text"])

    only = token_of(ord("z"))
    assert text(allowed_token_ids={"ids": [only]}) == "z" * 8
    assert text(logit_bias={only: 100}) == "z" * 8
    assert text(structured_outputs={"choice": {"texts": ["yes!"]}}) == "yes!"
    assert text(structured_outputs={"json": '{"const": 12}'}) == "12"
    assert text(allowed_token_ids={"ids": [only]}, echo=True) == "Go: " + "z" * 8
    assert text(detokenize=False) == ""
    assert text(max_tokens=3, allowed_token_ids={"ids": [only]}, bad_words=["q"], min_tokens=2) == "zzz"


def test_a_beam_search(server: RunningServer, client: Client) -> None:
    body = {"prompt": "Once", "max_tokens": 6, "n": 2, "use_beam_search": True, "beam_width": 2}
    http = server.post("/v1/completions", {**body, "length_penalty": 0.5, "early_stopping": "never"})
    beam = {"beam_width": 2, "length_penalty": 0.5, "early_stopping": "never"}
    params = {"n": 2, "max_tokens": 6}
    choices = client.call("Generate", {"text": "Once", "params": params, "beam": beam})["choices"]
    assert [choice["text"] for choice in choices] == [choice["text"] for choice in http["choices"]]
    assert choices[0]["score"] >= choices[1]["score"]
    assert all(bytes_of(choice["token_ids"]).decode("utf-8", "replace") for choice in choices)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({}, "prompt"),
        ({"text": ""}, "prompt"),
        ({"token_ids": {"ids": [256]}}, "prompt"),
        ({"chat": {"messages": [{"role": "nobody", "content": "x"}]}}, "messages[0].role"),
        ({"text": "x", "params": {"temperature": "NaN"}}, "temperature"),
        ({"text": "x", "params": {"top_p": 0.0}}, "top_p"),
        ({"text": "x", "params": {"n": 0}}, "n"),
        ({"text": "x", "params": {"n": 3}}, "n"),
        ({"text": "x", "params": {"max_tokens": 0}}, "max_tokens"),
        ({"text": "x", "params": {"logprobs": 21}}, "logprobs"),
        ({"text": "x", "params": {"logit_bias": {256: 1}}}, "logit_bias"),
        ({"text": "x", "params": {"logit_bias": {1: "Infinity"}}}, "logit_bias[1]"),
        ({"text": "x", "params": {"allowed_token_ids": {}}}, "allowed_token_ids"),
        ({"text": "x", "params": {"stop": [""]}}, "stop"),
        ({"text": "x", "params": {"structured_outputs": {}}}, "structured_outputs"),
        ({"text": "x", "params": {"structured_outputs": {"json": "{"}}}, "structured_outputs.json"),
        ({"text": "x", "params": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
        ({"text": "x", "beam": {"beam_width": 0}}, "beam_width"),
        ({"text": "x", "beam": {"beam_width": 2, "early_stopping": "soon"}}, "early_stopping"),
        ({"text": "x", "ttft_s": -1.0}, "ttft_s"),
        ({"text": "x", "params": {"detokenize": False, "stop": ["x"]}}, "stop"),
    ],
)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_what_is_wrong_is_named(client: Client, method: str, request_: dict[str, Any], field: str) -> None:
    error = client.refusal(method, request_)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field}: ")
    assert dict(error.trailing_metadata())["field"] == field


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client: Client) -> None:
    params = {"max_tokens": 1}
    assert client.call("Generate", {"text": "x" * 2047, "params": params})["choices"]
    error = client.refusal("Generate", {"text": "x" * 2048, "params": params})
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "2049" in error.details()
    assert "2048" in error.details()


def test_unknown_tokens_have_no_text(client: Client) -> None:
    error = client.refusal("Detokenize", {"token_ids": [1, 256]})
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "token_ids: 256 is not in 0..255"


def test_a_message_that_is_too_large_is_refused(client: Client) -> None:
    error = client.refusal("Tokenize", {"text": "x" * 70000})
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_full_queue_says_when_to_come_again(client: Client, server: RunningServer) -> None:
    request = {"text": "x", "params": {"max_tokens": 2000, "ignore_eos": True}}
    streams = [client.start("GenerateStream", request) for _ in range(2)]
    for stream in streams:
        next(stream)
    error = client.refusal("Generate", {"text": "x"})
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.trailing_metadata())["retry-after"]) >= 1
    for stream in streams:
        stream.cancel()
    wait_until_idle(server)


def test_a_cancelled_call_gives_its_blocks_back(client: Client, server: RunningServer) -> None:
    stream = client.start("GenerateStream", {"text": "x" * 500, "params": {"ignore_eos": True}})
    next(stream)
    stats = server.get("/stats")
    (running,) = stats["running"]
    assert running["prompt_tokens"] == 500
    assert stats["blocks"]["used"] > 0
    stream.cancel()
    wait_until_idle(server)
    blocks = server.get("/stats")["blocks"]
    assert blocks["free"] + blocks["cached"] == blocks["total"] - 1


def wait_until_idle(server: RunningServer) -> None:
    """Asks until the engine has dropped everything; each answer is one between two steps."""
    for _ in range(500):
        stats = server.get("/stats")
        if not stats["running"] and not stats["waiting"] and not stats["blocks"]["used"]:
            return
    raise AssertionError(stats)


def test_keys_and_health(artifact: Path) -> None:
    """All but health asks for the key; health follows the engine to its end."""
    with RunningServer(artifact, "--grpc-port", "0", "--api-key", "secret") as server:
        port = server.ready["grpc_port"]
        for metadata in ((), (("authorization", "Bearer secre"),), (("authorization", "secret"),)):
            channel = grpc.insecure_channel(f"127.0.0.1:{port}")
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{SERVICE}/GetModel")(b"", metadata=metadata, timeout=TIMEOUT_S)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        watch = grpc.insecure_channel(f"127.0.0.1:{port}").unary_stream("/grpc.health.v1.Health/Watch")
        states = watch(b"", timeout=TIMEOUT_S)
        assert next(states) == b"\x08\x01"  # SERVING, in protobuf's wire format
        known = Keyed(port)
        assert known.call("Generate", {"text": "x", "params": GREEDY})["choices"]
        os.kill(server.engine_pid, signal.SIGKILL)
        assert next(states) == b"\x08\x02"
        assert known.call("Check", {"service": SERVICE}, "grpc.health.v1.Health")["status"] == "NOT_SERVING"
        assert known.refusal("Generate", {"text": "x"}).code() == grpc.StatusCode.UNAVAILABLE


class Keyed(Client):
    """A client that shows its key also when it asks for descriptions."""

    def __init__(self, port: int) -> None:
        metadata = (("authorization", "Bearer secret"),)
        super().__init__(port, metadata)
        self.channel = grpc.intercept_channel(self.channel, _AddKey(metadata))
        self._metadata = ()


class _AddKey(grpc.StreamStreamClientInterceptor, grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_stream_stream(self, proceed: Any, details: Any, requests: Any) -> Any:
        return proceed(details._replace(metadata=self._metadata), requests)

    def intercept_unary_unary(self, proceed: Any, details: Any, request: Any) -> Any:
        return proceed(details._replace(metadata=self._metadata), request)


def test_generated_files_are_those_of_the_proto(tmp_path: Path) -> None:
    """`make proto` would change nothing."""
    pytest.importorskip("grpc_tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{DIRECTORY}", f"--python_out={tmp_path}"]
    subprocess.run([*command, f"--pyi_out={tmp_path}", "pagec_v1.proto"], check=True)
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert set(made) == {"pagec_v1_pb2.py", "pagec_v1_pb2.pyi"}
    assert made == {name: (DIRECTORY / name).read_text() for name in made}


def test_the_port_of_another_server_is_an_error(artifact: Path, server: RunningServer) -> None:
    port = str(server.ready["grpc_port"])
    command = [sys.executable, "-m", "pagec.runtime.cli", "serve", str(artifact), "--port", "0"]
    done = subprocess.run([*command, "--grpc-port", port], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert f"--grpc-port: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert done.stdout == ""
