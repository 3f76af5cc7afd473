"""``duograph bench KIND``: every figure the project claims comes from one of these.

A kind is a module of this folder with ``main(arguments) -> exit code``; it is imported only
when asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from duograph.runners.config_file import ModelError as ConfigFileError
from duograph.scheduler.exit_codes import ExitCode
from duograph.server.model_cache import ModelError
from duograph.server.options import UsageError, did_you_mean

KINDS = {
    "decode": ("decode", "inter-token latency by batch size, engine in process"),
    "prefill": ("prefill", "time to first token by prompt length, engine in process"),
    "offline": ("offline", "output tokens/s of many requests at once, engine in process"),
    "serve": ("serve", "tokens/s and latencies over HTTP by streams, the whole process tree"),
    "graphs": ("graphs", "per captured size: time, cost of the capture, cost of padding"),
    "startup": ("startup", "seconds of each stage of a start, with a cold and a warm cache"),
    "engine": ("engine", "decode, prefill and offline on one engine, with one start"),
    "structured": ("structured", "what a JSON schema costs in tokens/s, compile and mask time"),
    "scheduler": ("scheduler", "what a step costs on the host, by running requests; no model"),
    "frontend": ("frontend", "what one frontend process costs per token, with a scripted engine"),
    "soak": ("soak", "memory of a server's processes over many requests"),
    "cpu-peer": ("cpu_peer", "decode speed on CPU against transformers' generate, in one run"),
}


def main(arguments: Sequence[str]) -> int:
    """Runs one benchmark. Raises UsageError for an unknown kind."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, KINDS))
        lines = [f"  {name:{width}}  {text}" for name, (_, text) in KINDS.items()]
        print("usage: duograph bench KIND [flags]\n\nkinds:\n" + "\n".join(lines))
        return ExitCode.OK if arguments else ExitCode.USAGE
    if arguments[0] not in KINDS:
        hint = did_you_mean(arguments[0], list(KINDS))
        raise UsageError(f"unknown benchmark {arguments[0]!r}{hint}; duograph bench --help")
    module = importlib.import_module(f"duograph.server.bench.{KINDS[arguments[0]][0]}")
    try:
        code: int = module.main(list(arguments[1:]))
    except (ConfigFileError, ModelError) as error:
        print(f"duograph bench {arguments[0]}: error: {error}", file=sys.stderr)
        return ExitCode.MODEL
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
