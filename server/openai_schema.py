"""The OpenAI request bodies, strictly: what a field may hold, and the one error it gets if not.

Knows JSON values and ranges that do not depend on the model; those that do (vocabulary, context)
are checked in translate.py. Null means absent for every field, unknown fields are ignored, and
fields that are understood but not honoured are refused by name.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, Literal, TypeVar

import annotated_types
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    field_validator,
    model_validator,
)

from duograph.server.body import parse_object
from duograph.server.errors import ApiError, bad_field, not_supported, quote
from duograph.server.grammars import FIELDS

_log = logging.getLogger(__name__)

MAX_PROMPTS = 4  # of one completion request
MAX_CHOICES = 16  # n x prompts
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 16
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096

# template variables that a client may set, see ChatRequest.chat_template_kwargs
TEMPLATE_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort")

_REFUSED = (
    "prompt_embeds", "input_embeds", "audio", "image_data", "video_data", "audio_data",
    "custom_logit_processor", "custom_logit_processors", "logits_processors", "lora_path",
    "use_beam_search", "prompt_logprobs", "token_ids_logprob",
    "return_hidden_states", "stop_regex", "bad_words", "allowed_token_ids",
    "truncate_prompt_tokens", "structural_tag",
)  # fmt: skip
_REFUSED_IN_CHAT = ("functions", "chat_template", "documents", "best_of")
_REFUSED_IN_COMPLETIONS = ("suffix", "tools")

_INT = re.compile(r"-?[0-9]{1,10}")


def _logit_bias(value: Any) -> Any:
    """Keys are ints written as strings; a JSON object has no other."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and biases")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    bias = {}
    for key, number in value.items():
        if not _INT.fullmatch(key):
            raise ValueError(f"{quote(key)} is not a token id")
        if type(number) not in (int, float) or not -100.0 <= number <= 100.0:
            raise ValueError(f"the bias of token {key} must be a number in [-100, 100]")
        bias[int(key)] = float(number)
    return bias


def _stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"must have at most {MAX_STOPS} strings, got {len(stops)}")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise ValueError(f"must be strings of 1 to {MAX_STOP_CHARS} characters")
    return stops


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenCount = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[list[str], BeforeValidator(_stop)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_logit_bias)]


class Strict(BaseModel):
    """No value is changed in type; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class SamplingFields(Strict):
    """How to sample: fields of both endpoints, and under other names of /generate."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] | None = None
    n: Annotated[int, Field(ge=1)] = 1  # at most --max-n: see translate.py
    stop: Stop = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] = []
    no_stop_trim: StrictBool = False
    ignore_eos: StrictBool = False
    min_tokens: TokenCount = 0
    skip_special_tokens: StrictBool = True
    spaces_between_special_tokens: StrictBool = True  # none are put there in any case
    logit_bias: LogitBias = {}


class GrammarFields(Strict):
    """What the text must be, in SGLang's fields; read in grammars.py."""

    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None

    @property
    def grammar_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name, None) for name in FIELDS}


class _Common(SamplingFields, GrammarFields):
    """Fields of both endpoints."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None  # the newer name, which goes first
    seed: Int64 | None = None
    include_stop_str_in_output: StrictBool = False
    return_token_ids: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    rid: Annotated[str, Field(max_length=256)] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None
    priority: Int64 | None = None  # smaller goes first, with --schedule-policy priority
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None  # vLLM's; the guided_ ones are its older fields
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def client_id(self) -> str | None:
        """What the client calls its request: echoed in the answer's id, and what
        /abort_request knows it by."""
        return self.rid if self.rid is not None else self.request_id

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that says how many tokens to generate, and what it says."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_sequences(self) -> int:
        """What the request counts for in the queue; before ``prompt`` has been checked."""
        return self.n

    @property
    def keeps_stop_text(self) -> bool:
        return self.include_stop_str_in_output or self.no_stop_trim

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> _Common:
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "only allowed with stream: true")
        return self


class ToolCallFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunction


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None  # a string or text parts: read in translate.py
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


class ChatRequest(_Common):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: StrictBool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Any] | None = None  # read in tools.py
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    separate_reasoning: StrictBool = True
    include_reasoning: StrictBool = True
    function_call: Any = None
    modalities: list[Any] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _known_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, setting in value.items():
            if name not in TEMPLATE_VARIABLES:
                raise ValueError(f"{quote(name)} is not one of {', '.join(TEMPLATE_VARIABLES)}")
            if not isinstance(setting, (bool, str, int)):
                raise ValueError(f"{name} must be a boolean, a string or an integer")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_field("top_logprobs", "only allowed with logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_field(
                "continue_final_message", "must not be true together with add_generation_prompt"
            )
        if self.function_call not in (None, "none"):
            raise not_supported("function_call", "use tools and tool_choice")
        if self.modalities is not None and self.modalities != ["text"]:
            raise not_supported("modalities", 'only ["text"] is served')
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise bad_field(name, "must be at least 1")
        return self


class CompletionRequest(_Common):
    """Body of POST /v1/completions."""

    prompt: Any  # four forms: read in translate.py
    echo: StrictBool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None

    @property
    def num_sequences(self) -> int:
        prompts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        several = bool(prompts) and type(prompts[0]) is not int
        # more are refused by name, whatever the queue holds
        return self.n * (min(len(prompts), MAX_PROMPTS) if several else 1)

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise bad_field("best_of", f"must be equal to n ({self.n})")
        name, limit = self.token_limit
        if limit == 0 and not self.echo:
            raise bad_field(name, "must be at least 1 (0 needs echo: true)")
        return self


Body = TypeVar("Body", bound=BaseModel)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError 400 naming the field."""
    document = parse_object(body)
    refuse(document, _REFUSED + _REFUSED_IN_CHAT)
    return validate(ChatRequest, document)


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError 400 naming the field."""
    document = parse_object(body)
    refuse(document, _REFUSED + _REFUSED_IN_COMPLETIONS)
    return validate(CompletionRequest, document)


def refuse(document: dict[str, Any], names: tuple[str, ...]) -> None:
    """Takes ``names`` out of the document. Raises ApiError 400 if one of them asks for anything."""
    for name in names:
        if name in document and document[name] not in (False, "", [], {}):
            raise not_supported(name)
        if name in document and type(document[name]) is int:
            raise not_supported(name)
    for name in names:
        document.pop(name, None)


def validate(model: type[Body], document: dict[str, Any]) -> Body:
    """Raises ApiError 400 naming the field."""
    ignored = document.keys() - model.model_fields.keys()
    if ignored:
        _log.debug("fields without effect: %s", quote(", ".join(sorted(ignored))))
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _field_error(model, error) from error


def _field_error(model: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=True)[0]
    location = [str(part) for part in first["loc"]]
    name = location[0] if location else "body"
    param = ".".join(location) or None
    if first["type"] == "missing":
        return bad_field(param or name, "this field is required")
    cause = first.get("ctx", {}).get("error")
    if first["type"] == "value_error" and cause is not None:
        return bad_field(name, str(cause))
    field = model.model_fields.get(name)
    bounds = _range_text(field.annotation if field else None, field.metadata if field else [])
    if len(location) == 1 and bounds:
        return bad_field(name, f"must be {bounds}, got {_shown(first['input'])}")
    return bad_field(param or name, first["msg"])


def _range_text(annotation: Any, metadata: list[Any]) -> str:
    """Such as "a number in (0, 1]", from the bounds that the field declares."""
    for part in getattr(annotation, "__args__", ()):  # the Annotated member of a union
        metadata = [*metadata, *getattr(part, "__metadata__", ())]
    kind = "an integer" if "int" in str(annotation) else "a number"
    low = high = None
    for item in metadata:
        for bound in getattr(item, "metadata", [item]):  # FieldInfo holds its own list
            match bound:
                case annotated_types.Ge():
                    low = f"[{bound.ge}"
                case annotated_types.Gt():
                    low = f"({bound.gt}"
                case annotated_types.Le():
                    high = f"{bound.le}]"
    if low and not high:
        return f"{kind} of at least {low[1:]}"
    return f"{kind} in {low}, {high}" if low and high else ""


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return quote(value) if isinstance(value, str) else str(value)[:64]
