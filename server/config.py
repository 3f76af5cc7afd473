"""Configuration of the server floor: the flags of HTTP and of the process tree, and the
document that a frontend process starts from. Frozen and torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from duograph.runners.config import MODEL_GROUP, option

SERVER_GROUP = "Server"
API_GROUP = "API"
OBSERVABILITY_GROUP = "Observability"
DEBUG_GROUP = "Debug"


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Flags of the server floor."""

    host: str = option("127.0.0.1", "address to listen on", group=SERVER_GROUP)
    port: int = option(
        30000,
        "TCP port; 0 lets the system choose and prints it",
        group=SERVER_GROUP,
        minimum=0,
        maximum=65535,
    )
    frontend_workers: int | None = option(
        None,
        "HTTP processes that share the port; by cores if left out (1 up to 4 cores)",
        group=SERVER_GROUP,
        minimum=1,
        maximum=64,
    )
    shutdown_timeout: float = option(
        30.0,
        "seconds that running requests may take after SIGTERM",
        group=SERVER_GROUP,
        minimum=0,
        maximum=86400,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names accepted in the Host header besides the address; * accepts any",
        group=SERVER_GROUP,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "web origins whose pages may call the API (CORS); * allows any",
        group=SERVER_GROUP,
    )
    api_key: str | None = option(
        None,
        "clients must send this bearer token; prefer --api-key-file or the environment",
        group=API_GROUP,
    )
    api_key_file: str | None = option(
        None, "file with one accepted bearer token a line", group=API_GROUP
    )
    admin_api_key: str | None = option(
        None,
        "opens /flush_cache, /start_profile, /stop_profile and abort_all to who sends this bearer "
        "token; prefer the environment",
        group=API_GROUP,
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names of the model in the API; the first one is in the answers",
        group=MODEL_GROUP,
    )
    max_n: int = option(
        8, "most choices of one request (n)", group=API_GROUP, minimum=1, maximum=128
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes calls of functions; auto asks its chat template",
        group=API_GROUP,
        choices=("auto", "hermes", "qwen", "qwen25", "qwen3", "llama3", "llama3_json"),
    )
    reasoning_parser: str | None = option(
        None,
        "tell thoughts from the answer, for models that write <think>: the model opens them "
        "itself (qwen3) or begins inside them (qwen3-thinking, deepseek-r1)",
        group=API_GROUP,
        choices=("qwen3", "qwen3-thinking", "deepseek-r1", "deepseek_r1"),
    )
    max_body_bytes: int = option(
        4 * 1024 * 1024, "largest request body", group=API_GROUP, minimum=1024
    )
    skip_server_warmup: bool = option(
        False, "do not send the first request to oneself before saying ready", group=SERVER_GROUP
    )
    log_level: str = option(
        "info",
        "least important lines that are logged",
        group=OBSERVABILITY_GROUP,
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "text",
        "lines for people, or one JSON object a line",
        group=OBSERVABILITY_GROUP,
        choices=("text", "json"),
    )


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """All that one frontend process is told, as one JSON document over an inherited pipe: the
    key never stands in a command line or an environment."""

    http: HttpConfig  # with all keys blanked: see api_keys and admin_keys
    run_dir: str  # private folder of the sockets
    index: int  # from 0
    listen_fd: int  # the inherited listening TCP socket
    parent_pid: int
    model_folder: str  # holds config.json and tokenizer.json
    served_names: tuple[str, ...]  # at least one
    context_length: int | None = None  # --context-length, if given
    max_queue: int = 256  # --max-queue
    engine_silence_s: float = 32.0  # a ready engine that is silent for longer is dead
    server_info: dict[str, Any] = field(default_factory=dict)  # the flags; JSON-able, no key
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty = no key is asked for
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # empty = admin routes are closed
