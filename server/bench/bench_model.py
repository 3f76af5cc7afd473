"""A model folder that can be served although it holds nothing but a config.json.

Weights are drawn by ``--load-format dummy``; what is missing is a tokenizer as large as the
model's vocabulary, so that each sampled token has a text and a frontend does the work on it that
it would do for a real model. Knows files; knows no server.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class BenchModelError(ValueError):
    """The folder cannot be served; the text names it."""


def prepare_folder(folder: Path, scratch: Path) -> Path:
    """``folder`` itself if it has a tokenizer, else a folder below ``scratch`` with links to its
    files and a tokenizer.json made here.

    Raises:
        BenchModelError: there is no config.json with a vocab_size.
    """
    if (folder / "tokenizer.json").is_file():
        return folder
    path = folder / "config.json"
    try:
        vocab_size = json.loads(path.read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchModelError(f"{path} is not a model's configuration") from error
    if type(vocab_size) is not int or vocab_size < 1:
        raise BenchModelError(f"{path}: vocab_size is {vocab_size!r}")
    made = scratch / folder.resolve().name
    made.mkdir()
    for entry in folder.iterdir():
        (made / entry.name).symlink_to(entry.resolve())
    (made / "tokenizer.json").write_text(json.dumps(byte_level_tokenizer(vocab_size)))
    return made


def byte_level_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json document: the 256 bytes, then words, half of them with a space before.
    Without merges, so that text is encoded byte by byte; ids become text as they do in Llama's
    or Qwen's."""
    names = itertools.islice(itertools.chain(_byte_names(), _words()), vocab_size)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: number for number, name in enumerate(names)},
            "merges": [],
        },
    }  # fmt: skip


def _byte_names() -> Iterator[str]:
    """The byte-level alphabet (GPT-2, 2019) in order of bytes."""
    others = itertools.count(0x100)
    for byte in range(256):
        printable = 0x21 <= byte < 0x7F or 0xA1 <= byte < 0xAD or 0xAE <= byte
        yield chr(byte if printable else next(others))


def _words() -> Iterator[str]:
    """Distinct words of two letters and more; "\u0120" is the alphabet's space."""
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            word = "".join(letters)
            yield word
            yield "\u0120" + word
