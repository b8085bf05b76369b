"""The offline API: an engine inside the calling process, and the text around it.

Owns prompts, texts and stop strings of its callers, as the API process does for a server's clients.
Must not know how anything is scheduled or computed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.errors import ClientError
from pageturner.executor.adapters import NamedAdapters
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_with_defaults
from pageturner.params import SamplingParams
from pageturner.policies.pinned_prefixes import PinnedPrefixes
from pageturner.progress import Progress
from pageturner.request import Event, Logprob, PromptLogprob, Request
from pageturner.session import Session
from pageturner.text import parameters
from pageturner.text.answer_format import AnswerFormat
from pageturner.text.chat_request import ChatSettings, ToolCall, chat_prompt, read_answer, read_chat
from pageturner.text.conversation import prompt_tokens
from pageturner.text.output_stream import OutputPiece, OutputStream, output_streams
from pageturner.text.template_choice import give_template

Prompt = str | Sequence[int]
UNBOUNDED = 2**31
LONGEST_NAP = 0.05  # seconds; between naps a stream may be cancelled


@dataclass(slots=True)
class Completion:
    """One answer. `finish_reason`: "stop", "length", "abort"; `logprobs` only where they were asked
    for.

    score  of a beam: the sum of its logprobs, divided by its length ** length_penalty
    reasoning, tool_calls  of a chat: what stands in the answer beside its text
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(slots=True)
class RequestOutput:
    """A prompt and what came of it.

    cached_tokens      prompt tokens whose KV was there already for the first answer; others share
                       its own
    recomputed_tokens  of all answers: computed once more, because memory was short; never among the
                       cached
    prompt_logprobs  None, or for each prompt token: None for the first; logprob, rank, the
                     likeliest tokens
    request_id       of its first answer
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_logprobs: list[PromptLogprob | None] | None = None
    request_id: int = 0


class _TextPieces:
    """Takes the text of one answer, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def put(self, piece: OutputPiece) -> None:
        self.pieces.append(piece.text)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt and how it is answered. skip_special: control tokens are left out of the text; reads:
    how that is taken apart; pin: the KV stays when the answer has ended."""

    prompt: Prompt
    params: SamplingParams
    lora: str = ""
    skip_special: bool = True
    reads: AnswerFormat | None = None
    pin: bool = False


@dataclass(slots=True)
class _PendingAnswer:
    """An answer that is being made, and where it is written when it is complete."""

    stream: OutputStream
    text: _TextPieces
    output: RequestOutput
    answer: Completion

    def settle(self) -> None:
        """Write what the stream has become into the answer. ClientError if it failed."""
        stream, answer = self.stream, self.answer
        if stream.failure is not None:
            raise ClientError(400, stream.failure.code, stream.failure.message)
        answer.text = "".join(self.text.pieces)
        answer.token_ids = stream.tokens
        answer.logprobs = stream.logprobs
        answer.finish_reason = stream.finish
        answer.stop_reason = stream.stop_reason
        if answer.index == 0:
            self.output.cached_tokens = stream.cached
        self.output.recomputed_tokens += stream.recomputed
        if stream.request.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None, *stream.prompt_logprobs]


class LLM:
    """A model and its engine.

    model     path of a GGUF file, of a Hugging Face folder, its id on the hub, or an alias
    chat_template  a file, the text of a template, or the name of a family; "": the model's own, or
                   else its family's
    lora      LoRA adapters, folders as PEFT writes them, by the names that prompts ask for them by
    settings  any field of EngineConfig: max_num_seqs, kv_cache_dtype, policy, threads,
              generation_config, ...
    generation  the sampling defaults that the model's files name
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        chat_template: str = "",
        lora: Mapping[str, str | os.PathLike[str]] | None = None,
        **settings: Any,
    ) -> None:
        path = hub.resolve(model).path
        settings.setdefault("max_queue", UNBOUNDED)  # the caller holds all prompts already
        settings.setdefault("async_scheduling", False)  # the plain loop, unless somebody asks
        self.config = EngineConfig(model=str(path), **settings)
        self.tokenizer, self.generation = load_with_defaults(
            path, self.config.generation_config, self.config.load_format
        )
        tokenizer = self.tokenizer
        give_template(tokenizer, chat_template)
        self.built = make_engine(self.config, tokenizer=lambda: tokenizer)
        self._engine = self.built.engine
        self._ids = itertools.count(1)
        self.adapters = NamedAdapters(self._engine.adapters, lora or {})

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that are used if none are given: the defaults of SamplingParams,
        overridden by the model's files (setting `generation_config`)."""
        return SamplingParams(**self.generation.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        skip_special_tokens: bool = True,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids), all in one continuous batch, in the order given.

        params    None: `get_default_sampling_params()`
        progress  None: a progress line if stderr is a terminal. ClientError for a prompt that
                  cannot run.
        skip_special_tokens  whether texts, in which stop strings are looked for, leave control
                             tokens out
        lora      name of the adapter for all of them, or for each; "": the model as it is
        """
        prompts = _as_list(prompts)
        each = self._params_of_each(params, len(prompts))
        names = [lora] * len(prompts) if isinstance(lora, str) else list(lora)
        if len(names) != len(prompts):
            raise ClientError(
                400, "invalid_value", f"{len(prompts)} prompts but {len(names)} adapters", "lora"
            )
        asked = [
            _Asked(prompt, one, name, skip_special_tokens)
            for prompt, one, name in zip(prompts, each, names, strict=True)
        ]
        return self._answer(asked, progress)

    def _params_of_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        one = params or self.get_default_sampling_params()
        each = list(one) if isinstance(one, Sequence) else [one] * count
        if len(each) != count:
            raise ClientError(400, "bad_params", f"{count} prompts but {len(each)} sampling params")
        return each

    def _answer(self, asked: Sequence[_Asked], progress: bool | None = None) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        open_: dict[int, _PendingAnswer] = {}
        tokens = 0
        try:
            for one in asked:
                outputs.append(self._submit(one, open_))
            with Progress("generating", len(asked), enabled=progress) as line:
                while open_:
                    for event in self._step(open_):
                        tokens += len(event.tokens)
                    line.update(len(asked) - len(open_), f"{tokens} tokens")
        except BaseException:
            for output in outputs:
                self._engine.unpin(output.request_id)  # nobody will know of it
            raise
        finally:
            self._abort(open_)
        for output, one in zip(outputs, asked, strict=True):
            _keep_best(output, one.params)
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int = 4,
        params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """All answers of a beam search for each prompt, the best first, each with its `score`.
        `params` says max_tokens, length_penalty, early_stopping and what is forbidden; what draws
        tokens is ignored."""
        given = params or self.get_default_sampling_params()
        each = replace(given, beam_width=beam_width, n=beam_width, best_of=None)
        return self.generate(prompts, each, progress=progress, lora=lora)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        lora: str = "",
    ) -> Generator[str, None, RequestOutput]:
        """The text of one answer, piece by piece as it becomes certain. Ending the iteration aborts
        it.

        cancelled  asked before each step; true ends the answer with finish_reason "abort"
        Returns (to `yield from`) the whole answer.
        """
        open_: dict[int, _PendingAnswer] = {}
        params = params or self.get_default_sampling_params()
        if params.n != 1 or params.best_of not in (None, 1):
            raise ClientError(400, "invalid_value", "a stream has one answer: n must be 1", "n")
        try:
            output = self._submit(_Asked(prompt, params, lora), open_)
            state = next(iter(open_.values()), None)
            while open_ and state is not None:
                if cancelled():
                    state.stream.finish = "abort"
                    state.settle()
                    break
                sent = len(state.text.pieces)
                self._step(open_)
                if text := "".join(state.text.pieces[sent:]):
                    yield text
            return output
        finally:
            self._abort(open_)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        lora: str = "",
        **settings: Any,
    ) -> RequestOutput:
        """Answer one conversation through the model's chat template: one output, not a list of
        them. Its `text` is the content; thoughts and calls of tools stand beside it.

        tools, tool_choice  as in /v1/chat/completions; calls match their schemas
        settings  other fields of ChatSettings: reasoning_effort, chat_template_kwargs,
                  tool_call_parser ...
        """
        asked = ChatSettings(tools, tool_choice, **settings)
        read = read_chat(
            messages, params or self.get_default_sampling_params(), self.tokenizer, asked
        )
        output = self._answer([_Asked(read.prompt, read.params, lora, reads=read.answer)])[0]
        for answer in output.outputs:
            said = read_answer(read.answer, answer.text, answer.finish_reason)
            answer.text = said.content
            answer.reasoning = said.reasoning
            answer.tool_calls = said.tool_calls
        return output

    def chat_tokens(
        self, messages: Sequence[dict[str, Any]], *, continue_final_message: bool = False
    ) -> list[int]:
        """The prompt that the chat template makes of a conversation. continue_final_message: it
        ends where the last message, which is the assistant's, does; so the answer goes on with
        that."""
        prompt = chat_prompt(messages, self.tokenizer, goes_on=continue_final_message)
        return prompt_tokens(self.tokenizer, *prompt, special=False)

    # -- sessions ----------------------------------------------------------------------------------
    def session(self, prompt: Prompt, *, lora: str = "") -> Session:
        """A sequence in the caller's hand, which can be appended to, forked and freed; nothing is
        computed yet. Needs prefix caching, and a model without sliding windows. lora: the adapter
        of its answers."""
        return Session(self, self._tokens(prompt), lora)

    def advance(
        self,
        sessions: Sequence[Session],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """One answer for each session, all in one continuous batch; each becomes part of its
        session. Where a stop string ends an answer, its session goes on behind the text."""
        each = self._params_of_each(params, len(sessions))
        for session in sessions:
            session.check_open()
        if any(p.n != 1 or p.best_of not in (None, 1) for p in each):
            raise ClientError(
                400, "invalid_value", "a session has one answer: fork it for more", "n"
            )
        pairs = zip(sessions, each, strict=True)
        outputs = self._answer(
            [_Asked(session.tokens, one, session.lora, pin=True) for session, one in pairs]
        )
        for session, output in zip(sessions, outputs, strict=True):
            answer = output.outputs[0]
            ended = answer.finish_reason == "stop"
            kept = self._tokens_of(answer) if ended else answer.token_ids
            session.add_answer(kept, output.request_id if output.request_id in self._pins else None)
        return [output.outputs[0] for output in outputs]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text in the middle of a sequence."""
        return self.tokenizer.encode(text, add_special=False, parse_special=True)

    def unpin(self, id: int) -> None:
        """Release the KV that is kept for a session. Called by sessions."""
        self._engine.unpin(id)

    def pinned(self, id: int) -> tuple[int, int]:
        """Return how many blocks are kept for a session, and how many of them are shared. Called by
        sessions."""
        return self._pins.shared(id)

    @property
    def _pins(self) -> PinnedPrefixes:
        return self._engine.stack.pins

    def _tokens_of(self, answer: Completion) -> list[int]:
        """The tokens that make the text of an answer that was stopped. Where a stop string begins
        inside of a token the rest of the text is tokenised anew."""
        for count in range(len(answer.token_ids), -1, -1):
            told = self.tokenizer.decode_whole(answer.token_ids[:count], skip_special=True)
            if answer.text.startswith(told):
                return [*answer.token_ids[:count], *self.encode(answer.text[len(told) :])]
        raise AssertionError("the text of no tokens begins every text")

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True, parse_special=True)
        return prompt

    def _submit(self, asked: _Asked, open_: dict[int, _PendingAnswer]) -> RequestOutput:
        params = asked.params
        ids = self._tokens(asked.prompt)
        built, context = self.built, self.built.max_model_len
        if any(not 0 <= token < built.vocab_size for token in ids):
            raise ClientError(
                400, "invalid_value", f"prompt: token ids are 0 to {built.vocab_size - 1}", "prompt"
            )
        slots, width = self._engine.scheduler.slots, params.beam_width
        made, kept = parameters.answer_counts(params.n, params.best_of, width, slots)
        if (made > kept or width) and params.logprobs is None:
            params = replace(params, logprobs=0)
        params = parameters.resolve(
            params, self.tokenizer, min(built.vocab_size, self.tokenizer.vocab_size)
        )
        room = min(context, built.num_blocks * built.block_size + 1) - (params.max_tokens or 1)
        request = Request(
            id=next(self._ids),
            prompt=tuple(parameters.truncate(ids, params.truncate_prompt_tokens, room, context)),
            params=params,
            arrival=self._engine.clock(),
            adapter=self.adapters.digest(asked.lora),
            pin=asked.pin,
        )
        answers = [Completion(index) for index in range(made)]
        text = asked.prompt if isinstance(asked.prompt, str) else None
        output = RequestOutput(text, list(request.prompt), answers, request_id=request.id)
        sinks = [_TextPieces() for _ in answers]
        streams = output_streams(
            request,
            sinks,
            self._ids,
            self.tokenizer,
            skip_special=asked.skip_special,
            answer=asked.reads,
        )
        for stream, sink, answer in zip(streams, sinks, answers, strict=True):
            open_[stream.request.id] = _PendingAnswer(
                stream=stream, text=sink, output=output, answer=answer
            )
            self._deliver(self._engine.submit(stream.request), open_)
        return output

    def _step(self, open_: dict[int, _PendingAnswer]) -> list[Event]:
        events = self._engine.step()
        if self._engine.wake is not None:  # a policy that waits for more requests
            time.sleep(min(max(self._engine.wake - self._engine.clock(), 0.0), LONGEST_NAP))
        self._deliver(events, open_)
        return events

    def _deliver(self, events: list[Event], open_: dict[int, _PendingAnswer]) -> None:
        now = self._engine.clock()
        for event in events:
            state = open_.get(event.id)
            if state is None:
                continue
            state.stream.add_event(event, now)
            if state.stream.done:
                del open_[event.id]
                if event.finish is None:  # a stop string ended it, and the engine does not know
                    state.stream.times.timings = self._engine.abort(event.id)
                state.settle()

    def _abort(self, open_: dict[int, _PendingAnswer]) -> None:
        for id in open_:
            self._engine.abort(id)


def _keep_best(output: RequestOutput, params: SamplingParams) -> None:
    """Keep the likeliest answers, the best first, if more were made than are wanted; set the scores
    of beams."""
    if params.beam_width:
        for answer in output.outputs:
            answer.score = parameters.beam_score(answer.logprobs, params.length_penalty)
    elif params.best_of is None or params.best_of == params.n:
        return
    else:
        best = parameters.most_likely([answer.logprobs for answer in output.outputs], params.n)
        output.outputs = [replace(output.outputs[i], index=index) for index, i in enumerate(best)]
    if params.logprobs is None:
        for answer in output.outputs:
            answer.logprobs = []


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
