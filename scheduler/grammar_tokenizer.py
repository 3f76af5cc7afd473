"""A tokenizer.json for the grammar library in which special tokens cannot be spelled.

Text that a grammar forces is cut into tokens by the model's own tokenizer, which takes the
spelling of a special token for the token itself: an answer that must hold ``<|im_end|>`` would
end there. So special tokens get names that no grammar holds; their ids stay. Knows the file's
layout; knows no grammar library.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass

# what has no special tokens in it, in Lark: comments, strings, regular expressions
_LARK_LITERAL = r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/'


@dataclass(frozen=True)
class SpelledTokens:
    """``document`` is the text of the renamed tokenizer.json, ``ids`` the public names."""

    document: str
    ids: dict[str, int]

    @classmethod
    def of(cls, text: str) -> SpelledTokens:
        """Raises ValueError, KeyError or TypeError for what is no tokenizer.json."""
        document = json.loads(text)
        added = [token for token in document["added_tokens"] if token["special"]]
        ids = {token["content"]: token["id"] for token in added}
        secret = secrets.token_hex(8)
        names = {name: f"\uf8d2{secret}-{token}\uf8d3" for name, token in ids.items()}
        for token in added:
            token["content"] = names[token["content"]]
        model = document["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(n, n): token for n, token in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):  # unigram: [name, score] by id
            model["vocab"] = [[names.get(n, n), score] for n, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        return cls(json.dumps(document), ids)

    def in_lark(self, grammar: str) -> str:
        """The grammar with the special tokens that it names outside of its literals as ids."""
        marks = [name for name in self.ids if re.fullmatch(r"<[^<>\s\[]+>", name)]
        if not any(mark in grammar for mark in marks):
            return grammar
        pattern = f"{_LARK_LITERAL}|({'|'.join(map(re.escape, marks))})"
        return re.sub(pattern, lambda m: f"<[{self.ids[m[1]]}]>" if m[1] else m[0], grammar)
