"""`LLM`: texts from a model in this process, with vLLM's names and meanings.

    caller's thread    prompts and parameters are checked, tokenized, compiled (grammars)
    engine's thread    steps; tokens become text (Answer)

All callers share the engine's batches: `generate` in several threads, and `stream` in an event loop.
"""

from __future__ import annotations

import itertools
import numbers
import queue
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pagec.compiler.artifact import open_artifact
from pagec.compiler.errors import ArtifactError, CapacityError, PagecError, RequestError
from pagec.runtime.engine import Engine
from pagec.runtime.llm.answers import Answer, Job, Prompt
from pagec.runtime.llm.engine_thread import EngineThread
from pagec.runtime.llm.options import check_claims, check_neutral, engine_options
from pagec.runtime.llm.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from pagec.runtime.llm.streams import Stream
from pagec.runtime.models import find_artifact
from pagec.runtime.sampling.beam import BeamSearchParams, Hypothesis
from pagec.runtime.sampling.grammar import GrammarCompiler
from pagec.runtime.sampling.params import SamplingParams
from pagec.runtime.text.chat_template import ChatTemplate, Message
from pagec.runtime.text.choice import ChoiceText, bad_word_ids
from pagec.runtime.text.defaults import TOKENIZER_DIRECTORY
from pagec.runtime.text.messages import template_messages
from pagec.runtime.text.tokenizer import Tokenizer

PromptType = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model that answers.

    `model`: an artifact, or what `pagec compile` takes (compiled once, in a child process). `weights` and all
    `options` are the engine's; vLLM's names are taken as llm/options.py says. `seed`:
    requests without one get seeds that follow from it. `max_model_len`: the most tokens of a sequence, at
    most what the artifact was compiled for.

    A context manager; `close` ends what runs, the thread and the engine.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        weights: str | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        **options: Any,
    ) -> None:
        options, claims = engine_options(options)
        path, weights = find_artifact(str(model), weights, capture=not sys.stderr.isatty())
        artifact = open_artifact(path)
        check_claims(claims, artifact.program)
        longest = artifact.program.max_len
        if max_model_len is not None and not 1 <= max_model_len <= longest:
            raise CapacityError(
                f"{max_model_len} is not in 1..{longest}, the artifact's limit",
                place="max_model_len",
                remedy="compile the model with another --max-len",
            )
        has_tokenizer = (path / TOKENIZER_DIRECTORY / "tokenizer.json").is_file()
        self._tokenizer = Tokenizer.open(path) if has_tokenizer else None
        self.engine = engine = Engine(artifact, weights=weights, **options)
        self.max_model_len = max_model_len or longest
        self._path = path
        self._random = random.Random(seed) if seed is not None else None
        self._ids = itertools.count()
        self._thread = EngineThread(engine)
        self._close = weakref.finalize(self, self._thread.close)

    def close(self) -> None:
        """Aborts what runs and ends the engine; what is cached is kept in `kv_dir`. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; RequestError if it has none."""
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer", place="prompt", remedy="give token ids")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where no parameters are given."""
        return SamplingParams()

    # ---------------------------------------------------------------------------- generation

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One output for each prompt, in their order.

        A prompt is a text, token ids, or a mapping with "prompt" or "prompt_token_ids". Parameters are one
        for all or one for each. RequestError if one of them is invalid: it names the prompt's number, and
        nothing has run. A fault while it runs ends only its own request, see RequestOutput.error.
        """
        check_neutral(lora_request=lora_request, priority=priority)
        items = listed(prompts)
        params = one_each(sampling_params or self.get_default_sampling_params(), len(items))
        return self._generate("prompts", list(zip(items, params, strict=True)), self._prompt, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, as `generate` gives them. Messages are OpenAI's, as in a
        chat with the server. `chat_template`: in place of the model's own; `chat_template_kwargs`: what else
        the template knows."""
        check_neutral(continue_final_message=continue_final_message, lora_request=lora_request)
        chats: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = one_each(sampling_params or self.get_default_sampling_params(), len(chats))
        names = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        template = _template(chat_template) if chat_template is not None else None

        def prompt(chat: Sequence[Message]) -> Prompt:
            tokenizer = self.get_tokenizer()
            text = tokenizer.render_chat(template_messages(chat), tools=tools, template=template, **names)
            return Prompt(tokenizer.encode(text, add_special_tokens=False, place="messages"), text)

        return self._generate("messages", list(zip(chats, params, strict=True)), prompt, use_tqdm)

    def beam_search(
        self, prompts: PromptType | Sequence[PromptType], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest texts of each prompt, best first. A fault is raised when all have ended."""
        jobs = []
        for number, item in enumerate(listed(prompts)):
            with naming("prompts", number):
                job = self._job(self._prompt(item), params.as_greedy)
                limited = replace(params, max_tokens=job.params.max_tokens)
                jobs.append(replace(job, beam=limited))
        answers = self._run("prompts", jobs, use_tqdm)
        for answer in answers:
            if answer.request.error is not None:
                raise answer.request.error
        return [self._beams(answer, params) for answer in answers]

    def stream(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None, *, delta: bool = False
    ) -> Stream:
        """An asynchronous iterator of a prompt's output as it grows, or with `delta` of what is new.

        Left early it is aborted: when it is closed (`aclose`, the end of an `async with`), or when nobody
        holds it any more. RequestError comes with the first step.
        """
        params = sampling_params or self.get_default_sampling_params()
        return Stream(
            self._thread, lambda: self._job(self._prompt(prompt), params), self._answer, delta=delta
        )

    def _generate(
        self,
        name: str,
        items: Sequence[tuple[Any, SamplingParams]],
        make_prompt: Callable[[Any], Prompt],
        show: bool,
    ) -> list[RequestOutput]:
        jobs = []
        for number, (item, params) in enumerate(items):
            with naming(name, number):
                jobs.append(self._job(make_prompt(item), params))
        return [answer.whole for answer in self._run(name, jobs, show)]

    def _run(self, name: str, jobs: Sequence[Job], show: bool) -> list[Answer]:
        """Runs jobs to their end; RequestError before any has run if the engine refuses one."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        answers: list[Answer] = []

        def note(new: RequestOutput) -> None:
            if new.finished:
                done.put(None)

        def start() -> None:
            try:
                for number, job in enumerate(jobs):
                    with naming(name, number):
                        answers.append(self._answer(job, note))
            except Exception:
                abort()
                raise

        def abort() -> None:
            for answer in answers:
                self._thread.abort(answer)

        try:
            self._thread.call(start).result()
            with progress(len(jobs), show) as advance:
                for _ in jobs:
                    done.get()
                    advance()
        except BaseException:  # an interrupt from the keyboard may come at any time
            with suppress(PagecError):  # the engine has ended
                self._thread.call(abort).result()
            raise
        return answers

    def _answer(self, job: Job, give: Callable[[RequestOutput], None]) -> Answer:
        """Starts a job; in the engine's thread."""
        answer = Answer(str(next(self._ids)), job, self.engine, self._tokenizer, give)
        self._thread.watch(answer)
        return answer

    # ------------------------------------------------------------------------------- requests

    def _prompt(self, item: PromptType) -> Prompt:
        text: object = item
        if isinstance(item, Mapping):
            text, item = item.get("prompt"), item.get("prompt_token_ids", item.get("prompt"))
        if isinstance(item, str):
            return Prompt(self.get_tokenizer().encode(item), item)
        if not isinstance(item, Sequence) or not all(_is_token(token) for token in item):
            raise RequestError("is neither a text nor a list of token ids", place="prompt")
        return Prompt([int(token) for token in item], text if isinstance(text, str) else None)

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        """What the engine must know. Like vLLM, `max_tokens` is at most what the model's length leaves."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"{type(params).__name__} is no SamplingParams", place="sampling_params")
        room = self.max_model_len - len(prompt.ids)
        if room < 1:
            raise RequestError(
                f"{len(prompt.ids)} tokens leave no room for one more: a sequence holds {self.max_model_len}",
                place="prompt",
            )
        seed = params.seed
        if seed is None and self._random is not None:
            seed = self._random.getrandbits(63)
        detokenize = params.detokenize and self._tokenizer is not None
        params = replace(
            params, max_tokens=min(params.max_tokens or room, room), seed=seed, detokenize=detokenize
        )
        ChoiceText(self._tokenizer, params)  # finds what cannot be read
        wanted = params.structured_outputs
        return Job(
            prompt,
            params,
            bad_words=bad_word_ids(self.get_tokenizer(), params.bad_words) if params.bad_words else (),
            grammar=self._grammars.compile(wanted) if wanted is not None else None,
        )

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        self.get_tokenizer()
        file = self._path / TOKENIZER_DIRECTORY / "tokenizer.json"
        return GrammarCompiler(file, self.engine.program.vocab, self.engine.eos_token_ids)

    def _beams(self, answer: Answer, params: BeamSearchParams) -> BeamSearchOutput:
        prompt = answer.whole.prompt_token_ids
        found: list[Hypothesis] = answer.request.hypotheses[: params.n]
        return BeamSearchOutput(
            [
                BeamSearchSequence(
                    tokens := [*prompt, *beam.tokens],
                    list(beam.logprobs),
                    beam.cumulative_logprob,
                    beam.score,
                    self._tokenizer.decode(tokens) if self._tokenizer is not None else None,
                    beam.finish_reason,
                )
                for beam in found
            ]
        )


def _template(text: str) -> ChatTemplate:
    try:
        return ChatTemplate(text)
    except ArtifactError as error:
        raise RequestError(error.message, place="chat_template") from error


def _is_token(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def listed(prompts: PromptType | Sequence[PromptType]) -> list[Any]:
    """The prompts in what may be a single one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    return [items] if items and all(_is_token(item) for item in items) else items


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Parameters for each prompt."""
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} of them for {count} prompts", place="sampling_params")
    return list(params)


@contextmanager
def naming(name: str, number: int) -> Iterator[None]:
    """A RequestError says which of several it concerns."""
    try:
        yield
    except RequestError as error:
        place = error.place.removeprefix("messages")  # what is left of it begins with [ or is nothing
        field = f".{place}" if place == error.place != "prompt" else place.removeprefix("prompt")
        raise RequestError(error.message, place=f"{name}[{number}]{field}", remedy=error.remedy) from error


@contextmanager
def progress(count: int, show: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal; the function that moves it by one."""
    if not show or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("Prompts", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=count)
        yield lambda: bar.advance(task)
