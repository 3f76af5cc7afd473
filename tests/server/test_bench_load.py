"""The load generator of ``bench serve``: what it counts, and that it hides no failure."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from duograph.server.bench.bench_model import (
    BenchModelError,
    byte_level_tokenizer,
    prepare_folder,
)
from duograph.server.bench.http_load import LoadConfig, LoadResult, _Load

TOKENS = 5
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def event(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text}]}


async def send_events(
    writer: asyncio.StreamWriter, events: list[object], *, pause_s: float = 0.0
) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for one in events:
        line = one if isinstance(one, str) else json.dumps(one)
        chunk = f"data: {line}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()
        await asyncio.sleep(pause_s)
    writer.write(b"0\r\n\r\n")


def whole(tokens: int = TOKENS) -> list[object]:
    usage = {"choices": [], "usage": {"completion_tokens": tokens}}
    return [*(event("word") for _ in range(tokens)), usage, "[DONE]"]


def load(answers: list[Answer], *, streams: int = 1, timeout_s: float = 10.0) -> LoadResult:
    """What a load of ``len(answers)`` requests makes of a server that gives them in turn."""
    given = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                assert len(body["prompt"]) == 3 and max(body["prompt"]) < 50
                await next(given)(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> LoadResult:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        config = LoadConfig(
            host="127.0.0.1",
            port=server.sockets[0].getsockname()[1],
            streams=streams,
            requests=len(answers),
            input_len=3,
            output_len=TOKENS,
            vocab_size=50,
            seed=1,
            timeout_s=timeout_s,
            result_path="",
        )
        result = await _Load(config).run()
        server.close()
        return result

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def go_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "stdin"
    path.write_text("go\n" * 10)
    monkeypatch.setattr(sys, "stdin", path.open())


async def good(writer: asyncio.StreamWriter) -> None:
    await send_events(writer, whole())


async def slow(writer: asyncio.StreamWriter) -> None:
    await send_events(writer, whole(), pause_s=0.02)


async def short(writer: asyncio.StreamWriter) -> None:
    await send_events(writer, whole(TOKENS - 1))


async def cut(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    raise ConnectionError


async def refused(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nfull")


async def failed(writer: asyncio.StreamWriter) -> None:
    await send_events(writer, [event("word"), {"error": {"message": "out of luck"}}, "[DONE]"])


async def endless(writer: asyncio.StreamWriter) -> None:
    await send_events(writer, [event("word")] * 100, pause_s=0.05)


def test_an_answer_is_timed_from_its_sending_to_its_last_piece() -> None:
    result = load([slow] * 3)
    assert result.failures == {} and len(result.records) == 3
    for record in result.records:
        assert record.pieces == TOKENS
        assert record.sent < record.first < record.last
        # five words, usage and the end, each some 20 ms after the other
        assert len(record.gaps) >= TOKENS and sum(record.gaps) >= 0.02 * TOKENS
        assert record.last - record.first == pytest.approx(sum(record.gaps))


def test_streams_share_the_requests() -> None:
    result = load([good] * 7, streams=3)
    assert result.failures == {} and len(result.records) == 7


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (short, "4 tokens and not 5"),
        (cut, "the connection was closed in the middle of an answer"),
        (refused, "status 503: full"),
        (failed, "an error event: out of luck"),
    ],
)
def test_a_failure_is_counted_by_its_name_and_the_others_go_on(bad: Answer, named: str) -> None:
    result = load([good, bad, good, bad])
    assert result.failures == {named: 2}
    assert len(result.records) == 2


def test_a_request_without_end_is_given_up() -> None:
    result = load([endless, good], timeout_s=0.3)
    assert result.failures == {"no end within 0.3 s": 1}
    assert len(result.records) == 1


def test_the_made_up_tokenizer_has_a_text_for_every_id(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(byte_level_tokenizer(3_000)))
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size() == 3_000
    text = "A größte word, 日本 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    words = [tokenizer.decode([token]) for token in range(256, 3_000)]
    assert all(words) and len(set(words)) == len(words)


def test_a_folder_with_only_a_config_gets_a_tokenizer_and_keeps_its_files(tmp_path: Path) -> None:
    given, scratch = tmp_path / "given", tmp_path / "scratch"
    given.mkdir()
    scratch.mkdir()
    with pytest.raises(BenchModelError, match=r"config\.json is not a model's"):
        prepare_folder(given, scratch)
    (given / "config.json").write_text('{"vocab_size": 300}')
    made = prepare_folder(given, scratch)
    assert made.name == "given" and made != given
    assert (made / "config.json").read_text() == '{"vocab_size": 300}'
    assert Tokenizer.from_file(str(made / "tokenizer.json")).get_vocab_size() == 300
    assert not (given / "tokenizer.json").exists()
    (given / "tokenizer.json").write_text("{}")
    assert prepare_folder(given, scratch) == given
