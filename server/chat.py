"""Messages to the model's prompt, through the model's own chat template.

The one place that renders a template. The template comes with the model, never from a client;
it runs in the sandbox of transformers' renderer. Special tokens in client text are kept apart
from those of the template (tokenizer.SpecialTokenMask). Knows no HTTP, no sampling.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from duograph.server.errors import ApiError, bad_field, quote
from duograph.server.tokenizer import Masked, Tokenizer, TokenizerError

Message = dict[str, Any]

# a template that walks over content parts writes them one after another
_WALKS_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])")


class ChatTemplate:
    """The template of one model folder; ``available`` is False if it has none."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raises TokenizerError if the template does not compile."""
        self._tokenizer = tokenizer
        self._source = _template_source(folder, tokenizer)
        self.available = self._source is not None
        source = self.source = self._source or ""
        self.part_separator = "" if _WALKS_PARTS.search(source) else "\n"
        self._knows_developer = "developer" in source
        if self.available:
            self._compile()

    def reads(self, variable: str) -> bool:
        """True if the template mentions ``variable``."""
        return self._source is not None and variable in self._source

    async def encode(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
        tools: list[Any] | None = None,
    ) -> list[int]:
        """Token ids of the chat. Raises ApiError 400 if the template refuses it."""
        if self._source is None:
            raise ApiError(
                400,
                "This model has no chat template; use /v1/completions",
                param="messages",
            )
        mask = self._tokenizer.new_mask()
        hidden = [self._prepare(message, mask) for message in messages]
        text = self._render(
            hidden,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables or {},
            tools=None if tools is None else _hide(tools, mask),
        )
        if mask.used:
            return await self._tokenizer.encode_masked(Masked(text, mask))
        return await self._tokenizer.encode(text, add_special_tokens=False)

    def _prepare(self, message: Message, mask: Any) -> Message:
        hidden: Message = {key: _hide(value, mask) for key, value in message.items()}
        if hidden["role"] == "developer" and not self._knows_developer:
            hidden["role"] = "system"
        return hidden

    def _render(self, messages: list[Message], **options: Any) -> str:
        variables = {**self._tokenizer.named_tokens, **options.pop("variables")}
        try:
            rendered, _ = render_jinja_template(
                conversations=[messages], chat_template=self._source, **options, **variables
            )
        except TemplateError as error:
            reason = quote(str(error.message or "no reason given"))
            raise bad_field("messages", f"the chat template refuses them: {reason}") from error
        except ValueError as error:  # the renderer's own checks of continue_final_message
            raise bad_field(
                "continue_final_message", "the template does not end with the final message"
            ) from error
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise bad_field("messages", "the chat template cannot render them") from error
        text: str = rendered[0]
        return text

    def _compile(self) -> None:
        try:
            render_jinja_template(
                conversations=[[{"role": "user", "content": "."}]],
                chat_template=self._source,
                add_generation_prompt=True,
                **self._tokenizer.named_tokens,
            )
        except TemplateError as error:
            # a template that refuses this particular chat has compiled
            if getattr(error, "lineno", None) is not None:
                raise TokenizerError(f"the chat template is broken: {error}") from error


def _hide(value: Any, mask: Any) -> Any:
    """Client strings at any depth with their special tokens masked."""
    if isinstance(value, str):
        return mask.hide(value)
    if isinstance(value, list):
        return [_hide(item, mask) for item in value]
    if isinstance(value, dict):
        return {key: _hide(item, mask) for key, item in value.items()}
    return value


def _template_source(folder: Path, tokenizer: Tokenizer) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer.config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
