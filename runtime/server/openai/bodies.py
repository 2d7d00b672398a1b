"""The bodies of requests. Values of sampling parameters are checked by SamplingParams alone, whose messages
name field and range; here they are only described, for /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

# What OpenAI's clients send that changes nothing here.
IGNORED: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)

Number = Annotated[Any, WithJsonSchema({"type": "number"})]
Whole = Annotated[Any, WithJsonSchema({"type": "integer"})]
Flag = Annotated[Any, WithJsonSchema({"type": "boolean"})]
Texts = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
]
TokenIds = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                },
            ]
        }
    ),
]
Mapped = Annotated[Any, WithJsonSchema({"type": "object"})]
Anything = Annotated[Any, WithJsonSchema({})]


class Body(BaseModel):
    """A JSON object; null stands for a field that is left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None and key not in IGNORED}


class StreamOptions(Body):
    """`include_usage`: one more chunk at the end says what was used."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(Body):
    """What completions and chats have in common: OpenAI's fields, then those of pagec and vLLM."""

    model: str | None = None
    n: Whole = 1
    temperature: Number = 1.0
    top_p: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Mapped = None
    seed: Whole = None
    stop: Texts = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: Whole = 0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    allowed_token_ids: TokenIds = None
    bad_words: Texts = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: Flag = False
    min_tokens: Whole = 0
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    prompt_logprobs: Whole = None
    structured_outputs: Mapped = Field(
        None, description="One of json, regex, choice, grammar, json_object; also as guided_json and so on"
    )
    guided_json: Anything = None
    guided_regex: Annotated[Any, WithJsonSchema({"type": "string"})] = None
    guided_choice: Texts = None
    guided_grammar: Annotated[Any, WithJsonSchema({"type": "string"})] = None

    use_beam_search: bool = False
    beam_width: Whole = Field(None, description="Beams; n of them are given back. By default n")
    length_penalty: Number = 1.0
    early_stopping: Annotated[Any, WithJsonSchema({"enum": [True, False, "never", "all"]})] = False

    priority: Annotated[int, Field(ge=-(2**31), lt=2**31, description="Less comes first")] = 0
    cache_salt: str = Field("", max_length=256, description="Only equal salts share cached prefixes")
    ttft_s: float | None = Field(None, description="Seconds within which the first token should come")
    token_s: float | None = Field(None, description="Seconds within which each further token should come")
    return_timings: bool = False
    return_token_ids: bool = False


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompt
    max_tokens: Whole = 16
    logprobs: Whole = None
    echo: bool = False
    best_of: Whole = None
    suffix: str | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Whole = None
    max_completion_tokens: Whole = None
    logprobs: bool = False
    top_logprobs: Whole = None
    response_format: Mapped = None
    tools: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class TokenizeBody(Body):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]
