"""POST /tokenize and /detokenize: text or a chat to token ids, and back.

Bodies and answers hold the fields of both SGLang and vLLM, whose clients send one or several
texts. Knows the tokenizer and the chat template; needs no engine but its limits.
"""

from __future__ import annotations

from typing import Any

from pydantic import StrictBool

from duograph.scheduler.messages import EngineInfo
from duograph.server.body import parse_object
from duograph.server.errors import bad_field
from duograph.server.openai_schema import ChatRequest, Strict, parse_chat, validate
from duograph.server.tokenizer import Tokenizer
from duograph.server.translate import Translator, check_ids

MAX_TEXTS = 1024  # of one request


class TokenizeBody(Strict):
    """Body of POST /tokenize with ``prompt``. With ``messages`` it is that of a chat."""

    model: str | None = None
    prompt: str | list[str]
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False


class DetokenizeBody(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[Any]  # ids, or several lists of them
    skip_special_tokens: StrictBool = True


def parse_tokenize(body: bytes) -> TokenizeBody | ChatRequest:
    """Raises ApiError 400 naming the field."""
    document = parse_object(body)
    if "messages" in document:
        if "prompt" in document:
            raise bad_field("prompt", "must not be given together with messages")
        return parse_chat(body)
    return validate(TokenizeBody, document)


def parse_detokenize(body: bytes) -> DetokenizeBody:
    """Raises ApiError 400 naming the field."""
    return validate(DetokenizeBody, parse_object(body))


async def tokenize(
    body: TokenizeBody | ChatRequest, translator: Translator, info: EngineInfo
) -> dict[str, Any]:
    """{tokens, count, max_model_len}; lists of lists and of counts for a list of texts."""
    tokenizer = translator.tokenizer
    if isinstance(body, ChatRequest):
        tokens: list[Any] = await translator.chat_ids(body)
    else:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if len(texts) > MAX_TEXTS:
            raise bad_field("prompt", f"must be at most {MAX_TEXTS} texts, got {len(texts)}")
        special = body.add_special_tokens
        several = await tokenizer.encode_several(texts, add_special_tokens=special)
        tokens = several[0] if isinstance(body.prompt, str) else several
    is_batch = isinstance(body, TokenizeBody) and isinstance(body.prompt, list)
    answer = {
        "tokens": tokens,
        "count": [len(ids) for ids in tokens] if is_batch else len(tokens),
        "max_model_len": info.context_length,
    }
    if isinstance(body, TokenizeBody) and body.return_token_strs:
        rows = tokens if is_batch else [tokens]
        strings = await tokenizer.names(rows)
        answer["token_strs"] = strings if is_batch else strings[0]
    return answer


async def detokenize(
    body: DetokenizeBody, tokenizer: Tokenizer, info: EngineInfo
) -> dict[str, Any]:
    """{text, prompt}, both the same: one name is SGLang's, the other vLLM's."""
    is_batch = bool(body.tokens) and isinstance(body.tokens[0], list)
    rows = body.tokens if is_batch else [body.tokens]
    if len(rows) > MAX_TEXTS:
        raise bad_field("tokens", f"must be at most {MAX_TEXTS} lists, got {len(rows)}")
    for ids in rows:
        if not isinstance(ids, list):
            raise bad_field("tokens", "must be token ids only or lists of token ids only")
        if ids:
            check_ids(ids, info, "tokens")
    skip = body.skip_special_tokens
    texts = await tokenizer.decode_several(rows, skip_special_tokens=skip)
    text: Any = texts if is_batch else texts[0]
    return {"text": text, "prompt": text}
