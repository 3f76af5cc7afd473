"""Grammars over the model's tokens, by llguidance: compiled once, walked by each request.

Knows the library and nothing else of the engine. The library is imported when the first object
is made, so that an installation without it serves everything else. Nothing here is bounded in
time by itself: grammar_gate.py compiles in threads of its own, grammar_masks.py counts what masks
cost. Sizes are bounded here, by the library's own limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from duograph.scheduler.grammar_tokenizer import SpelledTokens
from duograph.scheduler.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES = 64 * 1024
# Converted by a parser in Python, which holds the interpreter's lock for some ms per KiB.
MAX_EBNF_BYTES = 16 * 1024
_MAX_ERROR_CHARS = 300
# llguidance 1.9.1 recurses without end, and the process dies, on a constant so close to the
# least 64-bit integer
_FATAL_NUMBER = re.compile(r"-9[0-9]{18}(?![0-9])")
# what llguidance says of a grammar that can neither go on nor end at its first token
_NO_TEXT = ("NoExtensionBias", "NoExtension")
_LOCATE_COMPILES = 200  # of subschemas, to find the one that is wrong


class GrammarError(ValueError):
    """The grammar cannot be used; the text is for the client."""


class TokenGrammar(Protocol):
    """One request's place in a grammar."""

    def consume(self, token: int) -> None:
        """Moves on by a token that was sampled. Raises GrammarError."""

    def fill(self, pointer: int, nbytes: int) -> None:
        """Writes the packed mask of the tokens that may follow, a set bit each, to memory.
        An end-of-sequence token is among them only where the grammar may end.
        Raises GrammarError."""


class CompiledGrammar(Protocol):
    """Shared by all requests with one text."""

    def start(self) -> TokenGrammar: ...


class GrammarCompiler(Protocol):
    """What the gate needs; ``GrammarLibrary`` is the real one."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises GrammarError whose text begins with the field that is wrong, and a colon."""


class NoGrammars:
    """A compiler that refuses everything."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """See GrammarCompiler."""
        text = f"{grammar.param}: structured output is not available: {self._reason}"
        raise GrammarError(text)


class GrammarLibrary:
    """llguidance over one model's tokenizer; ``compile`` may run in several threads."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Takes some tenths of a second and holds the interpreter's lock meanwhile: to be made
        while the engine starts. ``folder`` is the model's.

        Raises:
            GrammarError: the library is not installed, or cannot use the tokenizer.
        """
        try:
            import llguidance
        except ImportError as error:
            raise GrammarError("the package llguidance is not installed") from error
        self.version = str(llguidance.__version__)
        self._limits: LLParserLimits = llguidance.LLParserLimits(
            step_lexer_fuel=100_000,  # 7 ms of one mask, by the library's figures
            step_max_items=20_000,
            max_lexer_states=50_000,
            max_grammar_size=100_000,
            verbose_errors=False,
        )
        try:
            self._tokens = SpelledTokens.of((folder / "tokenizer.json").read_text(encoding="utf-8"))
            self._tokenizer: LLTokenizer = llguidance.LLTokenizer(
                self._tokens.document,
                n_vocab=vocab_size,
                eos_token=list(eos_token_ids) or None,
            )
        except Exception as error:  # the library raises what its parser raised
            raise GrammarError("llguidance cannot use this model's tokenizer") from error

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """See GrammarCompiler."""
        limit = MAX_EBNF_BYTES if grammar.kind == "ebnf" else MAX_GRAMMAR_BYTES
        if len(grammar.text.encode()) > limit:
            raise GrammarError(f"{grammar.param}: the grammar is longer than {limit} bytes")
        text = _as_library_text(grammar)
        text = self._with_ids(text)
        if _FATAL_NUMBER.search(text):
            raise GrammarError(f"{grammar.param}: whole numbers must be greater than -9e18")
        matcher, problem = self._build(text)
        if not problem:
            return _Compiled(matcher)
        for param, schema in grammar.schemas.items():
            found = self._locate(param, json.loads(schema))
            if found:
                raise GrammarError(found)
        raise GrammarError(f"{grammar.param}: {_brief(problem)}")

    def _with_ids(self, text: str) -> str:
        """A document whose Lark grammars name no special token, see grammar_tokenizer.py."""
        if not any(name in text for name in self._tokens.ids):
            return text
        document = json.loads(text)
        for one in document["grammars"]:
            if "lark_grammar" in one:
                one["lark_grammar"] = self._tokens.in_lark(one["lark_grammar"])
        return json.dumps(document)

    def _build(self, text: str) -> tuple[LLMatcher, str]:
        """A matcher at the start, its first mask computed, and what is wrong with it."""
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
            if not matcher.is_error():
                first = matcher.deep_copy()
                first.compute_bitmask()
                if first.is_error():  # some mistakes show no earlier
                    return matcher, first.get_error()
        except BaseException as error:
            raise _library_fault(error) from error
        return matcher, matcher.get_error() if matcher.is_error() else ""

    def _locate(self, param: str, schema: Any) -> str:
        """``param.path: reason`` of the smallest subschema that fails as ``schema`` does; empty
        if it compiles."""
        problem = self._schema_problem(schema)
        if not problem:
            return ""
        shared = {
            key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict)
            and key in schema
        }  # fmt: skip
        path, budget, node = param, _LOCATE_COMPILES, schema
        while True:
            for name, child in _subschemas(node):
                budget -= 1
                if budget < 0:
                    break
                whole = {**shared, **child} if isinstance(child, dict) else child
                if self._schema_problem(whole) == problem:
                    path, node = f"{path}.{name}", child
                    break
            else:
                return f"{path}: {_brief(problem)}"
            if budget < 0:
                return f"{path}: {_brief(problem)}"

    def _schema_problem(self, schema: Any) -> str:
        return self._build(json.dumps({"grammars": [{"json_schema": schema}]}))[1]


class _Compiled:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> TokenGrammar:
        return _Walk(self._matcher.deep_copy())


class _Walk:
    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def consume(self, token: int) -> None:
        try:
            consumed = self._matcher.consume_token(token)
        except BaseException as error:
            raise _library_fault(error) from error
        if not consumed:
            raise GrammarError(_brief(self._matcher.get_error()))

    def fill(self, pointer: int, nbytes: int) -> None:
        try:
            self._matcher.unsafe_compute_mask_ptr(pointer, nbytes)
        except BaseException as error:
            raise _library_fault(error) from error
        if self._matcher.is_error():
            raise GrammarError(_brief(self._matcher.get_error()))


def _library_fault(error: BaseException) -> BaseException:
    """A panic in the library's own code, which is no Exception, ends the one request that met
    it."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    return GrammarError(f"the grammar library failed on it ({type(error).__name__})")


def _as_library_text(grammar: Grammar) -> str:
    text = grammar.text if grammar.kind == "document" else _converted(grammar)
    if not grammar.prelude:
        return text
    first, *rest = json.loads(text)["grammars"]
    around = {"name": "start", "lark_grammar": grammar.prelude}
    return json.dumps({"grammars": [around, {**first, "name": "constrained"}, *rest]})


def _converted(grammar: Grammar) -> str:
    """GBNF as a document."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(grammar.text)
    except RecursionError:
        raise GrammarError(f"{grammar.param}: the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises several kinds, all about the text
        raise GrammarError(f"{grammar.param}: {_brief(str(error))}") from error
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """(name below it, subschema) of one JSON schema."""
    if not isinstance(schema, dict):
        return
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            for name, child in schema[key].items():
                yield f"{key}.{name}", child
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            for position, child in enumerate(schema[key]):
                yield f"{key}.{position}", child
    for key in ("items", "additionalProperties", "additionalItems"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]


def _brief(problem: str) -> str:
    """The library's message on one line: its first line, and the parser's reason if there is
    one further down."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    first = lines[0] if lines else "no reason given"
    if first in _NO_TEXT:
        return "no text satisfies it"
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    text = " ".join([first, *reasons[:1]])
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."
