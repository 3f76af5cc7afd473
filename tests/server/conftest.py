"""A real frontend process on a real socket, before a scripted engine process, and a small
tokenizer trained here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from duograph.server.config import FrontendConfig, HttpConfig
from duograph.server.scripted_engine import ScriptedEngineConfig

START_TIMEOUT_S = 60.0
SOURCES = str(Path(__file__).resolve().parents[2] / ".src")

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it stops.",
    "Zażółć gęślą jaźń. Größe, façade, naïve, Ελληνικά, Русский, 日本語, 한국어, emoji 🙂🚀.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: byte-level BPE, chat template, config.json."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512, "eos_token_id": 0}))
    return folder


@pytest.fixture(scope="session")
def raw_tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


def wait_until(condition: Callable[[], Any], timeout_s: float = 10.0, what: str = "") -> Any:
    """The first true value of ``condition``; fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.01)


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    return wait_until


@dataclass
class RunningServer:
    """A frontend and its engine."""

    port: int
    frontend: subprocess.Popen[bytes]
    engine: subprocess.Popen[bytes]
    log: Path  # what the engine has received, as JSON lines
    stderr: Path
    api_key: str | None = None
    _clients: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def http(self) -> httpx.Client:
        client = httpx.Client(base_url=self.url, headers=self.headers, timeout=30)
        self._clients.append(client)
        return client

    def openai(self, **options: Any) -> OpenAI:
        options = {"max_retries": 0, "timeout": 30.0} | options
        client = OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key or "none", **options)
        self._clients.append(client)
        return client

    def received(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The messages that have reached the engine, the oldest first."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        messages = [json.loads(line) for line in lines if line.endswith("}")]
        return [m for m in messages if kind is None or m["kind"] == kind]

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        for process in (self.frontend, self.engine):
            if process.poll() is None:
                process.kill()
            process.wait()


def start_server(
    folder: Path,
    run_dir: Path,
    *,
    http: HttpConfig | None = None,
    engine: dict[str, Any] | None = None,
    wait_for: str = "/health",
    frontend: dict[str, Any] | None = None,
) -> RunningServer:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    log = run_dir / "received.jsonl"
    stderr = run_dir / "frontend.log"
    engine_config = ScriptedEngineConfig(run_dir=str(run_dir), log=str(log), **(engine or {}))
    (run_dir / "engine.json").write_bytes(msgspec.json.encode(engine_config))
    config = FrontendConfig(
        http=http or HttpConfig(shutdown_timeout=5.0),
        run_dir=str(run_dir),
        index=0,
        listen_fd=listener.fileno(),
        parent_pid=os.getpid(),
        model_folder=str(folder),
        served_names=("tiny", "tiny-alias"),
        **(frontend or {}),
    )
    config_fd = os.memfd_create("config")
    os.write(config_fd, msgspec.json.encode(config))
    os.lseek(config_fd, 0, os.SEEK_SET)
    environ = os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-m"]
    with listener, stderr.open("wb") as errors:
        process = subprocess.Popen(
            [*python, "duograph.server.frontend", "--config-fd", str(config_fd)],
            pass_fds=(config_fd, listener.fileno()),
            env=environ,
            stderr=errors,
        )
        os.close(config_fd)
        engine_process = subprocess.Popen(
            [*python, "duograph.server.scripted_engine", "--config", f"{run_dir}/engine.json"],
            env=environ,
        )
        port = listener.getsockname()[1]
    keys = config.api_keys
    server = RunningServer(
        port, process, engine_process, log, stderr, api_key=keys[0] if keys else None
    )
    try:
        wait_until(lambda: _answers(server, wait_for), START_TIMEOUT_S, f"{wait_for} answers 200")
    except BaseException:
        server.stop()
        print(stderr.read_text())
        raise
    return server


def _answers(server: RunningServer, path: str) -> bool:
    if server.frontend.poll() is not None:
        pytest.fail(f"the frontend has ended: {server.stderr.read_text()}")
    try:
        return httpx.get(server.url + path, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def new_server(model_folder: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts a server of its own for one test; all options of ``start_server``."""
    servers: list[RunningServer] = []
    folders: list[tempfile.TemporaryDirectory[str]] = []

    def start(**options: Any) -> RunningServer:
        # not under tmp_path: a socket's path is limited to some hundred characters
        folders.append(tempfile.TemporaryDirectory(prefix="dg-"))
        folder = options.pop("folder", model_folder)
        server = start_server(folder, Path(folders[-1].name), **options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()
    for folder in folders:
        folder.cleanup()


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[RunningServer]:
    """One server for all tests that leave it as it was."""
    with tempfile.TemporaryDirectory(prefix="dg-") as run_dir:
        server = start_server(model_folder, Path(run_dir))
        yield server
        assert server.frontend.poll() is None, server.stderr.read_text()
        server.frontend.send_signal(signal.SIGTERM)
        assert server.frontend.wait(timeout=15) == 0, server.stderr.read_text()
        server.stop()


@pytest.fixture(scope="session")
def client(server: RunningServer) -> OpenAI:
    return server.openai()


@pytest.fixture(scope="session")
def http(server: RunningServer) -> httpx.Client:
    return server.http()
