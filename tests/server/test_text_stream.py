"""Tokens to text in pieces, and stop strings in pieces: cuts must not matter."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from duograph.server.text_stream import StopMatcher, WindowTextDecoder
from duograph.server.tokenizer import Tokenizer

SEQUENCES = 20_000


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture(scope="module")
def fallback_tokenizer() -> RawTokenizer:
    """Metaspace words with byte fallback, as Llama 2 has them."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "c", "\u2581the", "\u2581cat", "s", "é", "\u2581日", "本"]
    raw = RawTokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return raw


def cut(items: list[int], source: random.Random) -> list[list[int]]:
    pieces = []
    while items:
        size = source.randint(1, 5)
        pieces.append(items[:size])
        items = items[size:]
    return pieces


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_of_random_tokens_join_to_the_decoded_whole(
    tokenizer: Tokenizer, skip: bool
) -> None:
    source = random.Random(7)
    for _ in range(SEQUENCES // 2):
        # up to 512: the last ids are in no vocabulary, as in padded embeddings
        tokens = [source.randrange(512) for _ in range(source.randint(1, 24))]
        decoder = tokenizer.new_decoder(skip_special_tokens=skip)
        pieces = [decoder.push(piece) for piece in cut(tokens, source)]
        text = "".join(pieces) + decoder.flush()
        assert text == tokenizer.decode(tokens, skip_special_tokens=skip), tokens


def test_no_piece_ends_in_half_a_character(tokenizer: Tokenizer) -> None:
    text = "日本 🙂🚀 Größe Ελληνικά " * 5
    tokens = tokenizer.encode_now(text, add_special_tokens=False)
    decoder = tokenizer.new_decoder(skip_special_tokens=True)
    pieces = [decoder.push((token,)) for token in tokens]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert decoder.flush() == ""


def test_bytes_that_form_no_character_are_not_held_for_ever(tokenizer: Tokenizer) -> None:
    lead = next(t for t in range(480) if tokenizer.token_bytes(t) == b"\xe2")
    decoder = tokenizer.new_decoder(skip_special_tokens=True)
    shown = "".join(decoder.push((lead,)) for _ in range(1000))
    assert len(shown) == 999
    assert decoder.flush() == "\ufffd"


def test_valid_text_through_byte_fallback_joins_to_the_decoded_whole(
    fallback_tokenizer: RawTokenizer,
) -> None:
    source = random.Random(11)
    pieces_of_text = ["the", " cat", "s", " ", "  ", "é", "日", "本", "🙂", "ß", "\n", "abc"]
    for _ in range(2_000):
        text = "".join(source.choice(pieces_of_text) for _ in range(source.randint(1, 15)))
        tokens = fallback_tokenizer.encode(text, add_special_tokens=False).ids
        decoder = WindowTextDecoder(fallback_tokenizer, skip_special_tokens=True)
        pieces = [decoder.push(piece) for piece in cut(tokens, source)]
        assert "".join(pieces) + decoder.flush() == fallback_tokenizer.decode(tokens), text


def test_hopeless_bytes_through_byte_fallback_come_out_in_constant_time(
    fallback_tokenizer: RawTokenizer,
) -> None:
    decoder = WindowTextDecoder(fallback_tokenizer, skip_special_tokens=True)
    lead = 1 + 0xE2
    seen = 0
    for count in range(1, 2_001):
        seen += len(decoder.push((lead,)))
        assert count - seen < 4
        assert len(decoder._window) <= 8
    assert seen + len(decoder.flush()) == 2_000


# stop strings


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run_matcher(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(
    pieces=st.lists(st.text("abc", min_size=1, max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_a_stop_string_is_found_whatever_the_cuts(pieces: list[str], stops: list[str]) -> None:
    assert run_matcher(pieces, stops) == expected("".join(pieces), stops)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), max_size=12),
    stop=st.text("ab", min_size=1, max_size=5),
)
def test_no_character_of_a_stop_string_is_shown_and_nothing_else_is_held(
    pieces: list[str], stop: str
) -> None:
    matcher = StopMatcher([stop])
    so_far = shown = ""
    for piece in pieces:
        so_far += piece
        text, found = matcher.push(piece)
        shown += text
        if found is not None:
            return
        held = so_far[len(shown) :]
        assert so_far.startswith(shown)
        # exactly the longest end of the text that could still become the stop string
        assert held == max(
            (stop[:k] for k in range(len(stop)) if so_far.endswith(stop[:k])), key=len
        )


def test_stop_matching_is_linear_on_the_worst_text() -> None:
    stops = ["a" * 255 + "b", "a" * 200 + "c"]

    def seconds(length: int) -> float:
        best = float("inf")
        for _ in range(3):
            matcher = StopMatcher(stops)
            begun = time.process_time()
            for _ in range(length // 10):
                matcher.push("a" * 10)
            best = min(best, time.process_time() - begun)
        return best

    seconds(2_000)
    # linear is 8, quadratic 64: a busy machine cannot blur that
    assert seconds(200_000) / seconds(25_000) < 24
