"""``duograph bench soak``: does memory stay flat? Starts a server, sends many requests, and
prints the anonymous memory (resident + swapped) of each of its processes along the way.

Prompts are random words, every tenth client hangs up in mid-stream. Growth is counted from the
tenth part of the run on, when caches have filled. Flags after ``--`` go to ``duograph serve``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time

import psutil

from duograph.scheduler.exit_codes import ExitCode

START_TIMEOUT_S = 240.0
SAMPLES = 10
LISTENING = re.compile(rb"http://127\.0\.0\.1:(\d+)")


class SoakError(RuntimeError):
    """The server could not be started; one sentence."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("serve_flags", nargs="*", metavar="-- SERVE FLAGS")
    options = parser.parse_args(arguments)
    command = [sys.executable, "-m", "duograph.server", "--port", "0", *options.serve_flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        port = _port_when_ready(server)
        grown = _soak(options, port, psutil.Process(server.pid))
    except SoakError as error:
        print(f"duograph bench soak: error: {error}", file=sys.stderr)
        return ExitCode.INTERNAL
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    print(f"largest growth {100 * grown:.2f}%")
    return 0


def _port_when_ready(server: subprocess.Popen[bytes]) -> int:
    """Reads the log until the server listens, then polls /ready; a thread drains the rest."""
    assert server.stdout is not None
    port, line = 0, b""
    for line in server.stdout:
        if found := LISTENING.search(line):
            port = int(found.group(1))
            break
    if not port:
        last = line.decode(errors="replace").strip()
        raise SoakError(f"the server ended with exit code {server.wait()}: {last}")
    threading.Thread(target=server.stdout.read, daemon=True).start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return port
        except OSError:
            pass  # not listening yet: asked again until the deadline
        finally:
            connection.close()
        time.sleep(0.2)
    raise SoakError("the server did not become ready")


def _soak(options: argparse.Namespace, port: int, supervisor: psutil.Process) -> float:
    """Returns the largest growth of any process, as a share of what it held."""
    processes = [supervisor, *supervisor.children(recursive=True)]
    names = [" ".join(process.cmdline())[:28] for process in processes]
    print("requests | " + " | ".join(f"{name:>28}" for name in names) + "   (MB)")
    first: list[float] = []
    now: list[float] = []
    for sample in range(1, SAMPLES + 1):
        _send(options, port, options.requests // SAMPLES, seed=sample)
        now = [_anonymous_mb(process.pid) for process in processes]
        first = first or now
        row = " | ".join(f"{megabytes:28.2f}" for megabytes in now)
        print(f"{sample * (options.requests // SAMPLES):8} | {row}", flush=True)
    return max(after / before - 1 for before, after in zip(first, now, strict=True))


def _send(options: argparse.Namespace, port: int, count: int, seed: int) -> None:
    rng = random.Random(seed)
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    for _ in range(count):
        work.put(" ".join(f"w{rng.randrange(10_000)}" for _ in range(rng.randrange(1, 40))))
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            _client(port, work, options.max_tokens)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(options.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(f"a client failed: {failures[0]!r}") from failures[0]


def _client(port: int, work: queue.SimpleQueue[str], max_tokens: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    done = 0
    while True:
        try:
            prompt = work.get_nowait()
        except queue.Empty:
            connection.close()
            return
        done += 1
        stream = done % 2 == 0
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(500)!r}")
        if done % 10 == 0:  # hangs up in mid-stream
            response.read(1)
            connection.close()
        else:
            response.read()


def _anonymous_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
