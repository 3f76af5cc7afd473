"""Run folder, listening socket, child environment, keys and log lines."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from duograph.scheduler.logs import JsonFormatter, TextFormatter
from duograph.server import listener as tcp
from duograph.server.args import parse_serve
from duograph.server.child import Child, clean_environment, start_child
from duograph.server.config import HttpConfig
from duograph.server.launch import flag_values, read_api_keys
from duograph.server.options import UsageError
from duograph.server.run_folder import LONGEST_FOLDER, RunFolder, parent_folder, sweep_stale


def test_a_run_folder_is_private_and_gone_at_exit(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "scheduler.sock").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_stale_run_folders_are_swept_and_living_ones_are_not(tmp_path: Path) -> None:
    stale = tmp_path / "duograph-run-1-abcdefgh"
    stale.mkdir()
    (stale / "lock").write_text("")
    (stale / "frontend-0.sock").write_text("")
    foreign = tmp_path / "duograph-run-notes"
    foreign.mkdir()
    (tmp_path / "duograph-run-file").write_text("")
    with RunFolder(tmp_path) as living:
        assert sweep_stale(tmp_path) == [stale]
        assert living.path.is_dir() and foreign.is_dir()
        assert not stale.exists()


def test_the_folder_of_a_killed_process_is_stale(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, os, signal\n"
        "from duograph.server.run_folder import RunFolder\n"
        "RunFolder(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(tcp.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environ)
    assert len(list(tmp_path.iterdir())) == 1
    assert len(sweep_stale(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_takes_the_lock_before_it_deletes(tmp_path: Path) -> None:
    held = tmp_path / "duograph-run-1-abcdefgh"
    held.mkdir()
    lock = os.open(held / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert sweep_stale(tmp_path) == []
    os.close(lock)
    assert sweep_stale(tmp_path) == [held]


def test_a_deep_runtime_folder_is_passed_over(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * LONGEST_FOLDER)
    deep.mkdir()
    assert parent_folder({"XDG_RUNTIME_DIR": str(deep)}) != deep
    assert parent_folder({"XDG_RUNTIME_DIR": "relative"}) != Path("relative")
    short = Path("/tmp")
    assert parent_folder({"XDG_RUNTIME_DIR": str(short)}) == short


Bind = Callable[..., list[socket.socket]]


@pytest.fixture
def bind() -> Iterator[Bind]:
    """As ``tcp.bind``; the sockets are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def bound(host: str, port: int, count: int = 1) -> list[socket.socket]:
            return [stack.enter_context(one) for one in tcp.bind(host, port, count)]

        yield bound


@pytest.mark.parametrize("count", [1, 3])
def test_port_0_is_chosen_by_the_system_and_a_used_port_is_named(bind: Bind, count: int) -> None:
    first = bind("127.0.0.1", 0, count)
    tcp.listen(first)
    port = first[0].getsockname()[1]
    assert len(first) == count and {one.getsockname()[1] for one in first} == {port}
    assert port > 0 and tcp.url_of(first[0]) == f"http://127.0.0.1:{port}"
    for others in (1, 3):
        with pytest.raises(tcp.PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
            tcp.bind("127.0.0.1", port, others)


@pytest.mark.parametrize("count", [1, 3])
def test_two_that_bound_the_same_port_cannot_both_listen(bind: Bind, count: int) -> None:
    first = bind("127.0.0.1", 0, count)
    second = bind("127.0.0.1", first[0].getsockname()[1], count)
    tcp.listen(first)
    with pytest.raises(tcp.PortInUse):
        tcp.listen(second)


@pytest.mark.parametrize("count", [1, 3])
def test_a_bound_port_refuses_connections_until_it_listens(bind: Bind, count: int) -> None:
    listeners = bind("127.0.0.1", 0, count)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listeners[0].getsockname())


def test_the_kernel_spreads_connections_over_the_sockets_of_a_port(bind: Bind) -> None:
    listeners = bind("127.0.0.1", 0, 4)
    tcp.listen(listeners)
    with contextlib.ExitStack() as stack:
        for _ in range(256):
            stack.enter_context(socket.create_connection(listeners[0].getsockname()))
        counts = [_accept_all(listener) for listener in listeners]
    assert sum(counts) == 256
    assert min(counts) >= 32  # the mean is 64; by chance less than once in 100,000 runs


def test_a_socket_that_is_closed_gets_no_more_connections(bind: Bind) -> None:
    listeners = bind("127.0.0.1", 0, 2)
    tcp.listen(listeners)
    address = listeners[0].getsockname()
    listeners[0].close()
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(socket.create_connection(address))
        assert _accept_all(listeners[1]) == 16


def _accept_all(listener: socket.socket) -> int:
    listener.setblocking(False)
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a" * 300])
def test_a_foreign_host_is_named(host: str) -> None:
    for count in (1, 3):
        with pytest.raises(tcp.AddressError, match="--host"):
            tcp.bind(host, 0, count)


def test_wildcard_addresses_are_reached_over_loopback(bind: Bind) -> None:
    [listener] = bind("0.0.0.0", 0)
    port = listener.getsockname()[1]
    assert tcp.url_of(listener) == f"http://127.0.0.1:{port}"
    assert tcp.url_of(listener, "::") == f"http://[::]:{port}"


def test_children_get_no_secret_and_no_leave_to_go_online() -> None:
    kept = clean_environment(
        {
            "PATH": "/bin",
            "TOKENIZERS_PARALLELISM": "1",
            "CUDA_VISIBLE_DEVICES": "0",
            "MONKEY": "1",
            "DUOGRAPH_API_KEY": "s",
            "OPENAI_API_KEY": "s",
            "HF_TOKEN": "s",
            "AWS_SECRET_ACCESS_KEY": "s",
            "db_password": "s",
        }
    )
    assert "s" not in kept.values()
    assert {"PATH", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "MONKEY"} <= set(kept)
    assert kept["HF_HUB_OFFLINE"] == "1"


def test_a_child_reads_its_document_from_memory_and_shows_it_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "reads_config.py"
    output = tmp_path / "out"
    module.write_text(
        "import os, sys, json\n"
        "text = os.fdopen(int(sys.argv[2])).read()\n"
        "seen = [text, open('/proc/self/cmdline').read(), open('/proc/self/environ').read()]\n"
        f"open({str(output)!r}, 'w').write(json.dumps(seen))\n"
    )
    config = HttpConfig(api_key="hidden-key")
    environ = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "MY_API_KEY": "hidden-key"}
    child = start_child("reader", "reads_config", config, environ=environ)
    assert child.process.wait(30) == 0
    document, command, environment = json.loads(output.read_text())
    assert json.loads(document)["api_key"] == "hidden-key"
    assert "hidden-key" not in command + environment


def test_a_death_is_told_in_words() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child = Child("engine", process)
    assert child.exit_code() is None
    child.send(11)
    process.wait(30)
    assert child.death_notice() == "the engine process was killed by SIGSEGV"
    child.send(15)  # to nobody: the number may belong to another process now
    assert child.signals_sent == [11]


def test_keys_come_from_flag_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert read_api_keys(HttpConfig(api_key="zero", api_key_file=str(file))) == (
        "zero",
        "one",
        "two",
    )
    assert read_api_keys(HttpConfig()) == ()
    file.write_text("\n")
    with pytest.raises(UsageError, match="holds no key"):
        read_api_keys(HttpConfig(api_key_file=str(file)))
    with pytest.raises(UsageError, match="--api-key-file"):
        read_api_keys(HttpConfig(api_key_file=str(tmp_path / "nope")))


def test_the_flags_that_clients_can_see_hold_no_key() -> None:
    config = parse_serve(["--api-key", "hidden-key", "--cuda-graph-bs", "1", "2"], {})
    values = flag_values(config)
    assert "hidden-key" not in repr(values)
    assert values["cuda_graph_bs"] == (1, 2) and values["port"] == 30000


@pytest.mark.parametrize("hostile", ["a\nb", "a\r\x1b[2Jb", "\x00", "a\u2028b", "a\x85b"])
def test_a_message_is_one_line_whatever_is_in_it(hostile: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "client says %s", (hostile,), None)
    text = TextFormatter("").format(record)
    assert len(text.splitlines()) == 1 and "client says" in text
    line = JsonFormatter("frontend 0").format(record)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == f"client says {hostile}"
