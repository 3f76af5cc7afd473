"""The process tree: how it starts, drains, dies, and that nothing of it is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy
import openai
import psutil
import pytest
from safetensors.numpy import save_file

from duograph.tests.e2e.server_process import NO_GRAPHS, ServerProcess, eventually

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "hello"}]
GONE_S = 5.0


@pytest.fixture
def arguments(tiny_arguments: list[str]) -> list[str]:
    """Without graphs: the tree is the same and starts in half the time."""
    return [*tiny_arguments, *NO_GRAPHS]


class Stream(threading.Thread):
    """One long streamed answer, read in the background."""

    def __init__(self, server: ServerProcess, max_tokens: int = 1000) -> None:
        super().__init__(daemon=True)
        self._client = server.client()
        self._max_tokens = max_tokens
        self.chunks = 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.start()
        eventually(lambda: self.chunks > 3 or self.error, 30, "the stream runs")

    def run(self) -> None:
        try:
            for chunk in self._client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=self._max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                self.chunks += 1
                if chunk.choices and chunk.choices[0].finish_reason:
                    self.finish_reason = chunk.choices[0].finish_reason
        except (openai.OpenAIError, httpx.HTTPError) as error:
            self.error = error


def answers(server: ServerProcess) -> bool:
    with server.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
    return bool(answer.choices)


@pytest.mark.parametrize(
    ("title", "expected"), [("duograph: scheduler", 6), ("duograph: frontend", 7)]
)
def test_a_killed_child_takes_the_tree_along_and_a_restart_serves(
    arguments: list[str], tmp_path: Path, title: str, expected: int
) -> None:
    with ServerProcess(arguments, tmp_path) as server:
        server.wait_ready()
        port = server.port
        stream = Stream(server, max_tokens=3500)
        killed_at = time.monotonic()
        server.member(title).send_signal(signal.SIGKILL)
        assert server.wait(GONE_S) == expected
        stream.join(GONE_S)
        assert time.monotonic() - killed_at < GONE_S
        assert stream.error is not None and stream.finish_reason is None
        server.assert_nothing_left()
        role = title.removeprefix("duograph: ")
        assert f"the {role}" in server.log() and "was killed by SIGKILL" in server.log()
    with ServerProcess([*arguments, "--port", str(port)], tmp_path) as server:
        server.wait_ready()
        assert server.port == port and answers(server)
        assert server.stop() == 0


def test_a_killed_supervisor_leaves_no_orphan_and_its_folder_is_swept(
    arguments: list[str], tmp_path: Path
) -> None:
    with ServerProcess(arguments, tmp_path) as server:
        server.wait_ready()
        port = server.port
        assert len(server.members()) == 2
        server.send(signal.SIGKILL)
        server.wait(GONE_S)
        eventually(lambda: not server.members(), GONE_S, "all children gone")
        (stale,) = server.run_parent.iterdir()
        with ServerProcess([*arguments, "--port", str(port)], tmp_path) as successor:
            successor.wait_ready()
            assert not stale.exists()
            assert answers(successor)
            assert successor.stop() == 0
            successor.assert_nothing_left()


def test_sigterm_lets_a_stream_finish(arguments: list[str], tmp_path: Path) -> None:
    with ServerProcess(arguments, tmp_path) as server:
        server.wait_ready()
        stream = Stream(server, max_tokens=1500)
        server.send(signal.SIGTERM)
        eventually(lambda: "draining" in server.log(), 5, "the drain starts")
        eventually(lambda: server.get("/ready")[0] in (0, 503), 5, "new requests are refused")
        assert server.wait(60) == 0
        stream.join(10)
        assert stream.error is None and stream.finish_reason == "length"
        assert stream.chunks > 100
        server.assert_nothing_left()


def test_the_drain_has_an_end(arguments: list[str], tmp_path: Path) -> None:
    arguments = [*arguments, "--shutdown-timeout", "0.5"]
    with ServerProcess(arguments, tmp_path) as server:
        server.wait_ready()
        stream = Stream(server, max_tokens=3500)
        server.send(signal.SIGTERM)
        assert server.wait(10) == 0
        stream.join(10)
        assert isinstance(stream.error, openai.APIError)  # an error event, not a cut connection
        assert stream.finish_reason is None
        server.assert_nothing_left()


def test_a_second_interrupt_forces_the_end(arguments: list[str], tmp_path: Path) -> None:
    with ServerProcess(arguments, tmp_path) as server:
        server.wait_ready()
        stream = Stream(server, max_tokens=3500)
        server.send(signal.SIGINT)
        eventually(lambda: "draining" in server.log(), 5, "the drain starts")
        server.send(signal.SIGINT)
        assert server.wait(GONE_S) == 130
        stream.join(10)
        assert stream.finish_reason is None
        server.assert_nothing_left()


@pytest.mark.parametrize(("child", "code"), [("scheduler", 6), ("frontend 1", 7)])
def test_a_stopped_child_is_noticed(
    arguments: list[str], tmp_path: Path, child: str, code: int
) -> None:
    flags = ("--watchdog-timeout", "1", "--frontend-workers", "2")
    with ServerProcess([*arguments, *flags], tmp_path) as server:
        server.wait_ready()
        server.member(child).suspend()
        assert server.wait(10) == code
        server.assert_nothing_left()
        assert "silent" in server.log()


def test_an_end_signal_while_starting_is_obeyed(arguments: list[str], tmp_path: Path) -> None:
    with ServerProcess(arguments, tmp_path) as server:
        eventually(lambda: "Listening on" in server.log(), 60, "the children are started")
        server.send(signal.SIGTERM)
        assert server.wait(10) == 0
        server.assert_nothing_left()
        assert "ready to roll" not in server.log()


def test_while_loading_the_port_says_so(arguments: list[str], tmp_path: Path) -> None:
    with ServerProcess(arguments, tmp_path) as server:
        eventually(lambda: "Listening on" in server.log(), 60, "the port is open")
        seen: list[tuple[int, dict[str, Any]]] = []

        def is_ready() -> bool:
            status, body = server.get("/ready")
            if status:
                seen.append((status, json.loads(body)))
            return status == 200

        eventually(is_ready, 120, "ready")
        assert server.get("/health/live")[0] == 200
        before = [body for status, body in seen if status == 503]
        assert before and all(body["ready"] is False for body in before)
        assert all("error" in body and body["phase"] for body in before)
        assert server.stop() == 0


def test_a_used_port_is_one_sentence_and_exit_code_5(tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = [str(tiny_model), "--load-format", "dummy", "--port", port]
        with ServerProcess(flags, tmp_path) as server:
            assert server.wait(30) == 5
            (line,) = server.log().splitlines()
            assert f"port {port} on 127.0.0.1 is in use" in line and "--port" in line


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        (["--cuda-graph-bz", "1"], 2, "did you mean --cuda-graph-bs?"),
        (["--model-path", "/no/such/model"], 3, "/no/such/model"),
        (["--host", "192.0.2.1"], 2, "--host 192.0.2.1"),
    ],
)
def test_a_wrong_start_is_one_line_and_an_exit_code(
    tmp_path: Path, flags: list[str], code: int, part: str
) -> None:
    with ServerProcess([*flags, "--port", "0"], tmp_path) as server:
        assert server.wait(30) == code
        (line,) = server.log().splitlines()
        assert part in line


def copied_model(tiny_model: Path, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vocab_size": -1}, "config.json: vocab_size"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
    ],
)
def test_a_model_that_is_not_supported_is_known_before_an_engine_starts(
    tmp_path: Path, tiny_model: Path, changes: dict[str, Any], part: str
) -> None:
    folder = copied_model(tiny_model, tmp_path / "model", **changes)
    flags = [str(folder), "--load-format", "dummy", "--port", "0"]
    with ServerProcess(flags, tmp_path) as server:
        assert server.wait(30) == 3, server.log()
        (line,) = server.log().splitlines()
        assert part in line


def test_weights_that_do_not_fit_are_named(tmp_path: Path, tiny_model: Path) -> None:
    folder = copied_model(tiny_model, tmp_path / "model")
    save_file({"model.norm.weight": numpy.ones(64, "f4")}, folder / "model.safetensors")
    with ServerProcess([str(folder), "--port", "0"], tmp_path) as server:
        assert server.wait(60) == 3, server.log()
        assert "model.embed_tokens.weight" in server.log()
        assert "Traceback" not in server.log()
        server.assert_nothing_left()


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--max-total-tokens", "2000000000"), ("--max-running-requests", "65536")],
)
def test_too_little_memory_is_exit_code_4_and_names_a_flag(
    tmp_path: Path, tiny_model: Path, flag: str, value: str
) -> None:
    """A terabyte of keys, or 262 GB of one table: a row of it is a vocabulary long."""
    folder = copied_model(tiny_model, tmp_path / "model", vocab_size=4_000_000, hidden_size=16)
    arguments = [str(folder), "--load-format", "dummy", "--port", "0", *NO_GRAPHS]
    with ServerProcess([*arguments, flag, value], tmp_path) as server:
        assert server.wait(60) == 4, server.log()
        assert flag in server.log().replace("\n", " ")
        assert "weights do not fit" not in server.log()
        assert "Traceback" not in server.log()
        server.assert_nothing_left()


def test_a_context_beyond_the_model_is_a_usage_error(
    tmp_path: Path, tiny_arguments: list[str]
) -> None:
    with ServerProcess([*tiny_arguments, "--context-length", "999999"], tmp_path) as server:
        assert server.wait(30) == 2, server.log()
        (line,) = server.log().splitlines()
        assert "--context-length 999999" in line and "4096" in line


def test_keys_listeners_and_folders_are_private(arguments: list[str], tmp_path: Path) -> None:
    key = "sk-canary-4711"
    flags = [*arguments, "--frontend-workers", "2", "--api-key", key, "--host", "0.0.0.0"]
    environ = {"SOME_API_KEY": key, "DUOGRAPH_QUEUE_TIMEOUT": "61"}
    with ServerProcess(flags, tmp_path, environ=environ) as server:
        server.wait_ready()
        assert server.get("/v1/models")[0] == 401
        assert server.get("/health")[0] == 200
        with server.client(key) as client:
            assert client.models.list().data
        tree = [psutil.Process(server.process.pid), *server.members()]
        assert len(tree) == 4
        listening = {
            connection.laddr.port
            for process in tree
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {server.port}
        for process in tree:
            assert key not in " ".join(process.cmdline())
            if process.pid != server.process.pid:
                assert key not in " ".join(process.environ().values())
                assert not any(name.startswith("DUOGRAPH_") for name in process.environ())
        (folder,) = server.run_parent.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700 and folder.stat().st_uid == os.getuid()
        sockets = sorted(path.name for path in folder.iterdir() if path.is_socket())
        assert sockets == [
            "frontend-0.sock",
            "frontend-1.sock",
            "scheduler.sock",
            "supervisor.sock",
        ]
        assert key not in server.log()
        assert server.stop() == 0
        server.assert_nothing_left()
