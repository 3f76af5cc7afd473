"""POST /generate, SGLang's own form: bodies to plans, and choices to its JSON.

Answers differ from OpenAI's in more than names: streamed text, ids and logprobs are cumulative,
the finish reason is an object, and a list comes back when several were asked for. Knows no route
and no socket.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.messages import EngineInfo, Grammar, Logprobs
from duograph.server.answers import LOWEST_LOGPROB
from duograph.server.errors import ApiError, bad_field
from duograph.server.generation import Choice, ChoicePlan, Generation
from duograph.server.grammars import requested_grammar
from duograph.server.native_schema import (
    DEFAULT_NEW_TOKENS,
    GenerateBody,
    NativeSampling,
    inside,
    parse_sampling,
)
from duograph.server.openai_schema import MAX_PROMPTS
from duograph.server.sse import DONE, EventStream
from duograph.server.tokenizer import Tokenizer
from duograph.server.translate import (
    SamplingDefaults,
    Translator,
    check_ids,
    check_scores,
    choice_seed,
)

Triple = tuple[float | None, int, str | None]  # logprob, token id, its text if wanted


async def native_plans(
    body: GenerateBody, translator: Translator, info: EngineInfo
) -> list[ChoicePlan]:
    """Raises ApiError 400."""
    prompts = _prompts(body)
    plans: list[ChoicePlan] = []
    own_defaults = replace(translator, defaults=SamplingDefaults())
    for prompt, fields in zip(
        prompts, parse_sampling(body.sampling_params, len(prompts)), strict=True
    ):
        try:
            translator.check_choices(fields.n, len(prompts))
        except ApiError as error:
            raise inside(error) from error
        if isinstance(prompt, str):
            ids = await translator.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            check_ids(prompt, info, body.prompt_field)
            ids = prompt
        sampling = _sampling(body, fields, own_defaults, info, ids)
        grammar = _grammar(fields)
        for k in range(fields.n):
            seed = choice_seed(fields.sampling_seed, k)
            plans.append(
                ChoicePlan(
                    index=len(plans),
                    input_ids=ids,
                    sampling=msgspec.structs.replace(sampling, seed=seed),
                    stops=tuple(fields.stop),
                    keep_stop_text=fields.no_stop_trim,
                    skip_special_tokens=fields.skip_special_tokens,
                    return_token_ids=True,
                    grammar=grammar,
                )
            )
    if body.return_logprob and body.logprob_start_len >= 0:
        told = [len(plan.input_ids) - body.logprob_start_len for plan in plans]
        check_scores([max(0, n) for n in told], body.top_logprobs_num, "top_logprobs_num")
    return plans


def _prompts(body: GenerateBody) -> list[Any]:
    name, kind = body.prompt_field, str if body.text is not None else list
    prompts = body.prompts if body.is_batch else [body.prompts]
    if len(prompts) > MAX_PROMPTS:
        raise bad_field(name, f"must be at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    if not all(isinstance(prompt, kind) for prompt in prompts):
        what = "a string or strings" if kind is str else "a list of token ids or several"
        raise bad_field(name, f"must be {what}")
    if not all(prompts):
        raise bad_field(name, "must not be empty")
    return list(prompts)


def _grammar(fields: NativeSampling) -> Grammar | None:
    try:
        grammar = requested_grammar(fields.grammar_fields)
    except ApiError as error:
        raise inside(error) from error
    if grammar is None:
        return None
    place = "sampling_params."
    schemas = {place + param: schema for param, schema in grammar.schemas.items()}
    return msgspec.structs.replace(grammar, param=place + grammar.param, schemas=schemas)


def _sampling(
    body: GenerateBody,
    fields: NativeSampling,
    translator: Translator,
    info: EngineInfo,
    ids: list[int],
) -> SamplingParams:
    start = body.logprob_start_len
    scored = body.return_logprob and start >= 0
    try:
        if fields.max_new_tokens == 0 and not scored:
            raise bad_field("max_new_tokens", "must be at least 1 (0 needs logprob_start_len >= 0)")
        given = "max_new_tokens" in fields.model_fields_set
        asked = fields.max_new_tokens if given else None
        most = translator.max_tokens(
            len(ids), asked, DEFAULT_NEW_TOKENS, info, param=body.prompt_field
        )
        k = body.top_logprobs_num if body.return_logprob else None
        if fields.min_tokens > most:
            raise bad_field(
                "min_new_tokens",
                f"must be at most max_new_tokens ({most}), got {fields.min_tokens}",
            )
        sampling = translator.sampling(fields, most, k, info)
    except ApiError as error:
        if error.param == body.prompt_field:
            raise
        raise inside(error) from error
    if not scored:
        return sampling
    return msgspec.structs.replace(
        sampling, prompt_logprobs=body.top_logprobs_num, prompt_logprobs_start=max(1, start)
    )


@dataclass(frozen=True)
class NativeHead:
    """What all events of one answer share."""

    body: GenerateBody
    ids: list[str]  # by choice
    tokenizer: Tokenizer

    @classmethod
    def new(cls, body: GenerateBody, plans: list[ChoicePlan], tokenizer: Tokenizer) -> NativeHead:
        """Raises ApiError 400 for a list of rids that does not fit the prompts."""
        prompts = list(dict.fromkeys(id(plan.input_ids) for plan in plans))
        if isinstance(body.rid, list):
            if len(body.rid) != len(prompts):
                raise bad_field("rid", f"must be one string or {len(prompts)}, as many as prompts")
            ids = [body.rid[prompts.index(id(plan.input_ids))] for plan in plans]
        else:
            ids = [body.rid or uuid.uuid4().hex for _ in plans]
        return cls(body, ids, tokenizer)

    @property
    def is_list(self) -> bool:
        return self.body.is_batch or len(self.ids) > 1


class NativeOutput:
    """All that one choice has brought so far."""

    def __init__(self, head: NativeHead, choice: Choice) -> None:
        self._head = head
        self._choice = choice
        self.text = ""
        self._ids: list[int] = []
        self._logprobs: list[Triple] = []
        self._top: list[list[Triple] | None] = []
        self._begun = False

    def event(self, generation: Generation) -> dict[str, Any]:
        """The answer up to now; takes what the choice has not yet given out. Logprobs of the
        prompt are in the first event and in the last: they do not change in between."""
        choice, head = self._choice, self._head
        self._ids += choice.take_token_ids()
        meta: dict[str, Any] = {
            "id": head.ids[choice.plan.index],
            "finish_reason": _finish_reason(choice, generation.error),
            "prompt_tokens": len(choice.plan.input_ids),
            "completion_tokens": choice.completion_tokens,
            "cached_tokens": choice.cached_tokens or 0,
            "e2e_latency": generation.seconds,
        }
        if head.body.return_logprob:
            meta |= self._logprob_lists()
        # a copy: what is written later must not change what has been written
        event: dict[str, Any] = {
            "text": self.text,
            "output_ids": list(self._ids),
            "meta_info": meta,
        }
        if head.is_list:
            event["index"] = choice.plan.index
        return event

    def _logprob_lists(self) -> dict[str, Any]:
        choice = self._choice
        for entry in choice.take_entries():
            self._logprobs.append(self._triple(entry.logprobs.logprob, entry.token))
            self._top.append(self._best(entry.logprobs))
        lists: dict[str, Any] = {"output_token_logprobs": list(self._logprobs)}
        has_top = bool(self._head.body.top_logprobs_num)
        if has_top:
            lists["output_top_logprobs"] = list(self._top)
        if not self._begun or choice.ended:
            lists["input_token_logprobs"] = self._prompt_triples()
            if has_top:
                lists["input_top_logprobs"] = self._prompt_best()
        self._begun = True
        return lists

    def _prompt_triples(self) -> list[Triple]:
        ids, start = self._choice.plan.input_ids, self._head.body.logprob_start_len
        found: list[Triple] = [self._triple(None, ids[0])] if start == 0 else []
        entries = self._choice.prompt_entries
        for token, entry in zip(ids[max(1, start) :], entries, strict=False):
            found.append(self._triple(entry.logprob, token))
        return found

    def _prompt_best(self) -> list[list[Triple] | None]:
        first: list[list[Triple] | None] = [None] if self._head.body.logprob_start_len == 0 else []
        return first + [self._best(entry) for entry in self._choice.prompt_entries]

    def _best(self, logprobs: Logprobs) -> list[Triple]:
        pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=False)
        return [self._triple(value, token) for token, value in pairs]

    def _triple(self, logprob: float | None, token: int) -> Triple:
        text = None
        if self._head.body.return_text_in_logprobs:
            text = self._head.tokenizer.token_bytes(token).decode("utf-8", "replace")
        return (None if logprob is None else max(logprob, LOWEST_LOGPROB), token, text)


def native_answer(head: NativeHead, generation: Generation) -> Any:
    """One object, or a list of them for several prompts or choices."""
    answers = []
    for choice, pieces in zip(generation.choices, generation.texts, strict=True):
        output = NativeOutput(head, choice)
        output.text = "".join(pieces)
        answers.append(output.event(generation))
    return answers if head.is_list else answers[0]


def is_abort(error: ApiError) -> bool:
    """An abort on demand is a finish reason here, not an error."""
    return error.code == "aborted"


class NativeStream(EventStream):
    """Events of {text, output_ids, meta_info}, cumulative."""

    def __init__(
        self, generation: Generation, head: NativeHead, *, on_close: Callable[[], None]
    ) -> None:
        super().__init__(generation, on_close=on_close)
        self._outputs = [NativeOutput(head, choice) for choice in generation.choices]
        self._left = len(self._outputs)

    def payload(self, choice: Choice, text: str) -> bytes:
        output = self._outputs[choice.plan.index]
        output.text += text
        if not text and not choice.ended:
            return b""
        if choice.error is not None and not is_abort(choice.error):
            return self.error_event(choice.error)
        event = b"data: " + orjson.dumps(output.event(self.generation)) + b"\n\n"
        self._left -= choice.ended
        return event + DONE if self._left == 0 or choice.error is not None else event


def _finish_reason(choice: Choice, error: ApiError | None) -> dict[str, Any] | None:
    if choice.finish_reason == "stop":
        return {"type": "stop", "matched": choice.matched_stop}
    if choice.finish_reason == "length":
        return {"type": "length", "length": choice.completion_tokens}
    if error is not None:
        return {"type": "abort", "message": error.message, "status_code": error.status}
    return None
