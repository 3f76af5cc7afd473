"""OpenAI requests to engine requests: prompts to ids, fields to SamplingParams, limits.

Knows the model's limits and defaults; does not know responses, sockets or the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec

from duograph.runners.model_config import GenerationDefaults
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.messages import EngineInfo, Grammar
from duograph.server.chat import ChatTemplate, Message
from duograph.server.chat_features import PROMPT_TAIL_TOKENS, ChatFeatures, ParserFlags
from duograph.server.errors import bad_field, context_length_exceeded
from duograph.server.generation import ChoicePlan
from duograph.server.grammars import requested_grammar
from duograph.server.openai_schema import (
    MAX_CHOICES,
    MAX_PROMPTS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
)
from duograph.server.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # of the completions endpoint, by OpenAI

MAX_SCORES = 1 << 19  # log-probabilities of prompts in one answer

_INT64 = 2**64


@dataclass(frozen=True)
class SamplingDefaults:
    """What a client gets that leaves the field out: generation_config.json, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_model(cls, model: GenerationDefaults) -> SamplingDefaults:
        given = {field.name: getattr(model, field.name) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Echo:
    """A prompt that the answer begins with, and the index of each token's first character."""

    text: str = ""
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Translator:
    """Request bodies that have passed the schema, to plans for the engine."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    max_n: int
    parsers: ParserFlags = field(default_factory=ParserFlags)

    async def chat(self, request: ChatRequest, info: EngineInfo) -> list[ChoicePlan]:
        """Raises ApiError 400."""
        self.check_choices(request.n, 1)
        features = ChatFeatures.of(request, self.template, self.parsers)
        input_ids = await self._chat_ids(request, features)
        name, asked = request.token_limit
        max_tokens = self.max_tokens(len(input_ids), asked, None, info, param="messages")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        sampling = self.sampling(request, max_tokens, logprobs, info, max_name=name)
        tail = self.tokenizer.decode(input_ids[-PROMPT_TAIL_TOKENS:], skip_special_tokens=False)
        grammar = features.grammar(prompt_tail=tail)
        reader = features.reader(prompt_tail=tail)
        plans = self._plans(request, [input_ids], sampling, grammar=grammar)
        return plans if reader is None else [replace(plan, reader=reader) for plan in plans]

    async def chat_ids(self, request: ChatRequest) -> list[int]:
        """The prompt that the chat template makes. Raises ApiError 400."""
        features = ChatFeatures.of(request, self.template, self.parsers)
        return await self._chat_ids(request, features)

    async def _chat_ids(self, request: ChatRequest, features: ChatFeatures) -> list[int]:
        continues = request.continue_final_message
        adds_prompt = request.add_generation_prompt
        given = [self._message(i, message) for i, message in enumerate(request.messages)]
        messages, tools = features.prompt(given, self.template)
        return await self.template.encode(
            messages,
            tools=tools,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            variables=self._variables(request),
        )

    async def completion(self, request: CompletionRequest, info: EngineInfo) -> list[ChoicePlan]:
        """Raises ApiError 400. Plans with no tokens to generate must not reach the engine."""
        prompts = _prompts(request.prompt, info)
        self.check_choices(request.n, len(prompts))
        id_lists = [
            await self.tokenizer.encode(prompt, add_special_tokens=True)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        name, asked = request.token_limit
        max_tokens = min(
            self.max_tokens(len(ids), asked, DEFAULT_COMPLETION_TOKENS, info, param="prompt")
            for ids in id_lists
        )
        sampling = self.sampling(request, max_tokens, request.logprobs, info, max_name=name)
        grammar = requested_grammar(request.grammar_fields)
        if not request.echo:
            return self._plans(request, id_lists, sampling, grammar=grammar)
        scored = request.logprobs is not None
        if scored:
            check_scores(
                [len(ids) * request.n for ids in id_lists], request.logprobs or 0, "logprobs"
            )
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=request.logprobs)
        pairs = zip(prompts, id_lists, strict=True)
        skip = request.skip_special_tokens
        echoes = [self._echo(prompt, ids, skip=skip, scored=scored) for prompt, ids in pairs]
        return self._plans(request, id_lists, sampling, echoes, grammar=grammar)

    def _echo(self, prompt: str | list[int], ids: list[int], *, skip: bool, scored: bool) -> Echo:
        """The prompt as the answer begins with it, and where its tokens begin if ``scored``."""
        # a text is given back as it came, with the special tokens that its client wrote out
        skip = skip and not isinstance(prompt, str)
        decoder = self.tokenizer.new_decoder(skip_special_tokens=skip)
        pieces = [decoder.push((token,)) for token in ids]
        whole = "".join([*pieces, decoder.flush()])
        text = prompt if isinstance(prompt, str) else whole
        if not scored:
            return Echo(text)
        # what the tokenizer has put before the text, such as a begin mark, has no place in it
        at = len(text) - len(whole)
        offsets = []
        for piece in pieces:
            offsets.append(min(max(at, 0), len(text)))
            at += len(piece)
        return Echo(text, tuple(offsets))

    def _plans(
        self,
        request: ChatRequest | CompletionRequest,
        id_lists: list[list[int]],
        sampling: SamplingParams,
        echoes: Sequence[Echo] = (),
        *,
        grammar: Grammar | None = None,
    ) -> list[ChoicePlan]:
        plans: list[ChoicePlan] = []
        for input_ids, echo in zip(id_lists, echoes or [Echo()] * len(id_lists), strict=True):
            for k in range(request.n):
                plans.append(
                    ChoicePlan(
                        index=len(plans),
                        input_ids=input_ids,
                        sampling=msgspec.structs.replace(
                            sampling, seed=choice_seed(request.seed, k)
                        ),
                        stops=tuple(request.stop),
                        keep_stop_text=request.keeps_stop_text,
                        skip_special_tokens=request.skip_special_tokens,
                        echo_text=echo.text,
                        echo_offsets=echo.offsets,
                        return_token_ids=request.return_token_ids,
                        grammar=grammar,
                    )
                )
        return plans

    def check_choices(self, n: int, prompts: int) -> None:
        if n > self.max_n:
            raise bad_field("n", f"must be an integer in [1, {self.max_n}], got {n}")
        if n * prompts > MAX_CHOICES:
            raise bad_field("n", f"n x prompts must be at most {MAX_CHOICES}, got {n} x {prompts}")

    def _message(self, index: int, message: ChatMessage) -> Message:
        param = f"messages.{index}.content"
        fields = message.model_dump(exclude_none=True)
        if message.content is None:
            if not message.tool_calls:
                raise bad_field(param, "this field is required")
            return fields
        fields["content"] = self._content(message.content, param)
        return fields

    def _content(self, content: Any, param: str) -> str:
        if isinstance(content, str):
            return content
        if not isinstance(content, list) or not content:
            raise bad_field(param, "must be a string or a non-empty list of text parts")
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise bad_field(param, 'only parts with type "text" are served')
            if not isinstance(part.get("text"), str):
                raise bad_field(param, "a text part needs the string field text")
            texts.append(part["text"])
        return self.template.part_separator.join(texts)

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        variables = dict(request.chat_template_kwargs)
        if request.reasoning_effort is not None and self.template.reads("reasoning_effort"):
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        return variables

    def max_tokens(
        self,
        prompt_tokens: int,
        asked: int | None,
        default: int | None,
        info: EngineInfo,
        *,
        param: str,
    ) -> int:
        """How many tokens to generate: what was asked for if it fits, else what is left."""
        limit = min(info.context_length, info.max_total_num_tokens)
        room = limit - prompt_tokens
        if prompt_tokens == 0:
            raise bad_field(param, "must not be empty")
        if room < (1 if asked is None else asked) or (asked != 0 and room < 1):
            raise context_length_exceeded(
                context_length=limit, prompt_tokens=prompt_tokens, max_tokens=asked, param=param
            )
        if asked is not None:
            return asked
        return room if default is None else min(default, room)

    def sampling(
        self,
        request: SamplingFields,
        max_tokens: int,
        logprobs: int | None,
        info: EngineInfo,
        *,
        max_name: str = "max_tokens",
    ) -> SamplingParams:
        """What the request asks for, this model's defaults elsewhere. Raises ApiError 400."""
        vocab_size = info.vocab_size
        if request.min_tokens > max_tokens:
            raise bad_field(
                "min_tokens", f"must be at most {max_name} ({max_tokens}), got {request.min_tokens}"
            )
        top_k = self.defaults.top_k if request.top_k is None else request.top_k
        if request.top_k is not None and request.top_k > vocab_size:
            raise bad_field("top_k", f"must be -1 or an integer in [0, {vocab_size}], got {top_k}")
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(request, name):
                if not 0 <= token < vocab_size:
                    raise bad_field(
                        name, f"token ids must be in [0, {vocab_size - 1}], got {token}"
                    )

        def chosen(name: str) -> float:
            value = getattr(request, name)
            return float(getattr(self.defaults, name) if value is None else value)

        return SamplingParams(
            max_new_tokens=max_tokens,
            min_new_tokens=request.min_tokens,
            temperature=chosen("temperature"),
            top_p=chosen("top_p"),
            top_k=-1 if top_k < 1 else min(top_k, vocab_size),
            min_p=chosen("min_p"),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=chosen("repetition_penalty"),
            logit_bias=request.logit_bias,
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            logprobs=logprobs,
        )


def choice_seed(seed: int | None, k: int) -> int:
    """The seed of choice ``k``: the client's own for the first, drawn if there is none.

    Later ones are spread by the 64-bit golden ratio, as in SplitMix64 (Steele et al. 2014), so
    that choice 1 of seed 7 is not choice 0 of seed 8."""
    if seed is None:
        return secrets.randbits(63)
    mixed = (seed + k * 0x9E3779B97F4A7C15) % _INT64
    return mixed - _INT64 if mixed >= _INT64 // 2 else mixed


def _prompts(value: Any, info: EngineInfo) -> list[str | list[int]]:
    """The four forms: a string, strings, token ids, lists of token ids."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list) and value:
        prompts = [value] if type(value[0]) is int else value
    else:
        raise bad_field("prompt", "must be a non-empty string, list of strings or token ids")
    if len(prompts) > MAX_PROMPTS:
        raise bad_field("prompt", f"must be at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    kinds = {type(prompt) for prompt in prompts}
    if kinds not in ({str}, {list}):
        raise bad_field("prompt", "must be strings only or lists of token ids only")
    for prompt in prompts:
        if not prompt:
            raise bad_field("prompt", "must not be empty")
        if isinstance(prompt, list):
            check_ids(prompt, info)
    return prompts


def check_scores(tokens: Sequence[int], k: int, param: str) -> None:
    """``tokens`` of each prompt are to be told with ``k`` alternatives. Raises ApiError 400 for
    an answer so large that writing it would keep others waiting."""
    entries = sum(tokens) * (k + 1)
    if entries > MAX_SCORES:
        raise bad_field(
            param,
            f"{sum(tokens)} prompt tokens with {k} alternatives each are {entries} values; one "
            f"answer holds {MAX_SCORES}",
        )


def check_ids(ids: list[Any], info: EngineInfo, param: str = "prompt") -> None:
    """Raises ApiError 400 unless all are ids of the vocabulary and the context holds them."""
    if len(ids) > info.context_length:
        raise context_length_exceeded(
            context_length=info.context_length,
            prompt_tokens=len(ids),
            max_tokens=None,
            param=param,
        )
    if set(map(type, ids)) != {int}:
        raise bad_field(param, "token ids must be integers")
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        raise bad_field(param, f"token ids must be in [0, {info.vocab_size - 1}]")
