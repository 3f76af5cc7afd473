"""``python -m duograph.tests.benchmarks.bench_scheduler``: as ``duograph bench scheduler``."""

import sys

from duograph.server.bench.scheduler import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
