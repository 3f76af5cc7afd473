"""The body of POST /generate, SGLang's own form: what a field may hold.

As openai_schema.py, which it shares the ranges with: null means absent, unknown fields are
ignored, what is understood and not honoured is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictBool, model_validator

from duograph.server.body import parse_object
from duograph.server.errors import ApiError, bad_field
from duograph.server.openai_schema import (
    MAX_LOGPROBS,
    GrammarFields,
    Int64,
    SamplingFields,
    Strict,
    TokenCount,
    refuse,
    validate,
)

DEFAULT_NEW_TOKENS = 128
PROMPT_FIELDS = ("text", "input_ids")

_REFUSED = (
    "input_embeds", "image_data", "video_data", "audio_data", "custom_logit_processor",
    "lora_path", "token_ids_logprob", "session_params", "return_hidden_states",
)  # fmt: skip
_REFUSED_SAMPLING = ("stop_regex", "structural_tag", "custom_params")

Name = Annotated[str, Field(max_length=256)]


class NativeSampling(SamplingFields, GrammarFields):
    """One object of ``sampling_params``."""

    max_new_tokens: TokenCount = DEFAULT_NEW_TOKENS
    min_tokens: TokenCount = Field(0, alias="min_new_tokens")
    sampling_seed: Int64 | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0


class GenerateBody(Strict):
    """Body of POST /generate."""

    text: Any = None  # a string or several: exactly one of text and input_ids
    input_ids: Any = None  # one prompt's ids or several's
    sampling_params: Any = None  # an object, or one for each prompt
    stream: StrictBool = False
    rid: Name | list[Name] | None = None
    return_logprob: StrictBool = False
    logprob_start_len: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    return_text_in_logprobs: StrictBool = False
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    priority: Int64 | None = None

    @property
    def prompts(self) -> Any:
        return self.input_ids if self.text is None else self.text

    @property
    def prompt_field(self) -> str:
        return "input_ids" if self.text is None else "text"

    @property
    def is_batch(self) -> bool:
        """Several prompts, also if there is only one of them."""
        prompts = self.prompts
        return isinstance(prompts, list) and bool(prompts) and type(prompts[0]) is not int

    @model_validator(mode="after")
    def _check_combinations(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise bad_field("text", "exactly one of text and input_ids must be given")
        return self


def parse_generate(body: bytes) -> GenerateBody:
    """Raises ApiError 400 naming the field."""
    document = parse_object(body)
    refuse(document, _REFUSED)
    return validate(GenerateBody, document)


def parse_sampling(value: Any, prompts: int) -> list[NativeSampling]:
    """One for each of ``prompts``. Raises ApiError 400 naming the field."""
    several = value if isinstance(value, list) else [{} if value is None else value] * prompts
    if len(several) != prompts:
        raise bad_field("sampling_params", f"must be one object or {prompts}, as many as prompts")
    return [_sampling(one) for one in several]


def _sampling(value: Any) -> NativeSampling:
    if not isinstance(value, dict):
        raise bad_field("sampling_params", "must be an object")
    document = {name: field for name, field in value.items() if field is not None}
    try:
        refuse(document, _REFUSED_SAMPLING)
        return validate(NativeSampling, document)
    except ApiError as error:
        raise inside(error) from error


def inside(error: ApiError) -> ApiError:
    """The same error with its field inside of sampling_params."""
    place = f"sampling_params.{error.param}"
    return ApiError(error.status, f"sampling_params.{error}", param=place, code=error.code)
