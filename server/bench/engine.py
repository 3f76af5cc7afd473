"""``duograph bench engine``: decode, prefill and offline on one engine, so with one start.

The workloads and their figures are those of the three benchmarks of these names.
"""

from __future__ import annotations

import argparse
import sys

from duograph.server.bench import decode, offline, prefill
from duograph.server.bench.in_process import add_engine_flags, create_engine


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench engine", description=__doc__)
    add_engine_flags(parser)
    offline.add_workload_flags(parser)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=decode.BATCH_SIZES)
    parser.add_argument("--input-len", type=int, default=decode.INPUT)
    parser.add_argument("--lengths", type=int, nargs="+", default=prefill.LENGTHS)
    options = parser.parse_args(arguments)
    engine = create_engine(options)
    decode.measure(engine, options.batch_sizes, input_len=options.input_len)
    prefill.measure(engine, options.lengths)
    offline.measure(engine, options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
