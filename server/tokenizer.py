"""The model's tokenizer: text to ids in a thread pool, ids to text pieces, ids to bytes.

Knows the files tokenizer.json, tokenizer_config.json and special_tokens_map.json; does not know
chat templates, requests or the engine.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from duograph.server.text_stream import ByteTextDecoder, TextDecoder, WindowTextDecoder

INLINE_CHARS = 1024  # shorter texts encode faster than a thread wakes up
ENCODE_THREADS = 2

_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TokenizerError(Exception):
    """The tokenizer's files are missing or broken; the text names the file."""


@dataclass(frozen=True)
class Masked:
    """Text in which special tokens written by a client are masked: see SpecialTokenMask."""

    text: str
    mask: SpecialTokenMask


class Tokenizer:
    """One per frontend process. Encoding may run in several threads at once."""

    def __init__(self, folder: Path) -> None:
        """Raises TokenizerError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} is missing: a model folder needs its tokenizer")
        try:
            self._raw: RawTokenizer = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        self._raw.no_truncation()
        self._raw.no_padding()
        self.config = _read_json(folder / "tokenizer_config.json")
        self.named_tokens = _named_tokens(
            self.config, _read_json(folder / "special_tokens_map.json")
        )
        added = self._raw.get_added_tokens_decoder()
        # content -> id, of the tokens that the model was trained to see as marks
        self.special_tokens = {t.content: i for i, t in added.items() if t.special}
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        names = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._special_pattern = re.compile(names)
        self._mark_pattern = re.compile(f"\uf8d0([0-9]+)-([0-9]+)\uf8d1|{names}")
        self._special_ids = frozenset(self.special_tokens.values())
        self._pool = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="encode")
        self._aliased: _AliasedTokenizer | None = None
        self._aliased_lock = threading.Lock()
        self._byte_level = _is_byte_level(self._raw)
        size = 1 + max(self._raw.get_vocab(with_added_tokens=True).values(), default=-1)
        vocab_size = _read_json(folder / "config.json").get("vocab_size")
        padded = max(size, vocab_size if isinstance(vocab_size, int) else 0)
        self._bytes = [self._bytes_of(token) for token in range(padded)]
        self._visible = [
            b"" if token in self._special_ids else data for token, data in enumerate(self._bytes)
        ]

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. ``add_special_tokens`` puts the model's begin mark, if it has one."""
        if len(text) <= INLINE_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, lambda: self.encode_now(text, add_special_tokens=add_special_tokens)
        )

    async def encode_several(
        self, texts: list[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """``encode`` of each, off the event loop if they are long together."""

        def work() -> list[list[int]]:
            return [self.encode_now(t, add_special_tokens=add_special_tokens) for t in texts]

        if sum(map(len, texts)) <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # the batch call is the one that releases the interpreter lock and skips offsets
        [encoding] = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    async def encode_masked(self, masked: Masked) -> list[int]:
        """Ids of a rendered chat whose client texts were masked."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: self._encode_masked_now(masked))

    def prepare_masking(self) -> None:
        """Builds, in the pool, what the first masked text will need; a large vocabulary takes
        some tenths of a second, best spent while the engine starts. May be left out."""
        self._pool.submit(self._aliased_tokenizer)

    def _encode_masked_now(self, masked: Masked) -> list[int]:
        return self._aliased_tokenizer().encode(masked)

    def _aliased_tokenizer(self) -> _AliasedTokenizer:
        with self._aliased_lock:
            if self._aliased is None:
                self._aliased = _AliasedTokenizer(self._raw, self.special_tokens)
            return self._aliased

    def new_decoder(self, *, skip_special_tokens: bool) -> TextDecoder:
        if self._byte_level:
            return ByteTextDecoder(self._visible if skip_special_tokens else self._bytes)
        return WindowTextDecoder(self._raw, skip_special_tokens=skip_special_tokens)

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._raw.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    async def decode_several(
        self, rows: list[list[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """``decode`` of each, off the event loop if they are long together."""

        def work() -> list[str]:
            return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in rows]

        if sum(map(len, rows)) <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def names(self, rows: list[list[int]]) -> list[list[str]]:
        """What each token stands for, with U+FFFD for parts of characters."""

        def work() -> list[list[str]]:
            return [[self.token_bytes(t).decode("utf-8", "replace") for t in ids] for ids in rows]

        if sum(map(len, rows)) <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for; empty for an id that the vocabulary lacks."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def new_mask(self) -> SpecialTokenMask:
        return SpecialTokenMask(self._special_pattern, self._mark_pattern)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _bytes_of(self, token: int) -> bytes:
        name = self._raw.id_to_token(token)
        if name is None:
            return b""
        if self._byte_level:
            chars = [_BYTE_OF_CHAR.get(char) for char in name]
            # a name with a foreign character is an added token and stands for itself
            return name.encode() if None in chars else bytes(c for c in chars if c is not None)
        match = _BYTE_FALLBACK.fullmatch(name)
        if match:
            return bytes([int(match[1], 16)])
        return bytes(name.replace("\u2581", " ").encode())


class SpecialTokenMask:
    """Replaces special tokens that stand in client text by marks that no client can guess.

    A template may trim, split or join texts; the marks pass through it, and afterwards the
    special tokens in the rendered chat are those that the template itself has written."""

    def __init__(self, special: re.Pattern[str], marks: re.Pattern[str]) -> None:
        """``special`` finds every special token, ``marks`` those and every mark."""
        self._special = special
        self._marks = marks
        self._nonce = str(secrets.randbits(64))
        self._originals: list[str] = []

    @property
    def used(self) -> bool:
        return bool(self._originals)

    def hide(self, text: str) -> str:
        return self._special.sub(self._mark, text)

    def reveal(self, rendered: str, aliases: dict[str, str]) -> str:
        """Special tokens become their aliases, marks become the text that they stand for."""

        def replace(match: re.Match[str]) -> str:
            nonce, number = match[1], match[2]
            if nonce is None:
                return aliases[match[0]]
            # a mark that the client has made up is text
            return self._originals[int(number)] if nonce == self._nonce else match[0]

        return self._marks.sub(replace, rendered)

    def _mark(self, match: re.Match[str]) -> str:
        self._originals.append(match[0])
        # digits and private-use characters survive upper, lower, trim and JSON filters
        return f"\uf8d0{self._nonce}-{len(self._originals) - 1}\uf8d1"


class _AliasedTokenizer:
    """The same tokenizer with its special tokens under secret names, so that their public
    names are plain text to it, wherever they stand, and no text needs to be cut in pieces:
    pieces would get begin-of-text spaces of their own in some tokenizers."""

    def __init__(self, raw: RawTokenizer, special_tokens: dict[str, int]) -> None:
        """Raises TokenizerError if the renamed tokenizer numbers them differently."""
        secret = secrets.token_hex(8)
        self.aliases = {
            name: f"\uf8d2{secret}-{token}\uf8d3" for name, token in special_tokens.items()
        }
        document = json.loads(raw.to_str())
        for entry in document["added_tokens"]:
            entry["content"] = self.aliases.get(entry["content"], entry["content"])
        vocab = document["model"].get("vocab")
        if isinstance(vocab, dict):
            renamed = {self.aliases.get(name, name): token for name, token in vocab.items()}
            document["model"]["vocab"] = renamed
        elif isinstance(vocab, list):  # unigram: [name, score] by id
            document["model"]["vocab"] = [[self.aliases.get(n, n), s] for n, s in vocab]
        unknown = document["model"].get("unk_token")
        if unknown in self.aliases:
            document["model"]["unk_token"] = self.aliases[unknown]
        self._raw: RawTokenizer = RawTokenizer.from_str(json.dumps(document))
        for name, token in special_tokens.items():
            if self._raw.token_to_id(self.aliases[name]) != token:
                raise TokenizerError(f"special token {name!r} cannot be told from plain text")

    def encode(self, masked: Masked) -> list[int]:
        text = masked.mask.reveal(masked.text, self.aliases)
        [encoding] = self._raw.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def _read_json(path: Path) -> dict[str, Any]:
    """{} for a file that is not there. Raises TokenizerError."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return document


def _named_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on: a chat template reads them."""
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name) or special_map.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _is_byte_level(raw: RawTokenizer) -> bool:
    decoder = json.loads(raw.to_str()).get("decoder") or {}
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders", [])
        return len(steps) == 1 and steps[0].get("type") == "ByteLevel"
    return decoder.get("type") == "ByteLevel"


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet (GPT-2, 2019): printable Latin-1 bytes stand
    for themselves, the others are numbered on from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + number): byte for number, byte in enumerate(others)}
    return alphabet


_BYTE_OF_CHAR = _byte_level_alphabet()
