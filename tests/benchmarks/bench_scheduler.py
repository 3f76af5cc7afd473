"""``python -m duograph.tests.benchmarks.bench_scheduler``: the table of server/bench_scheduler."""

from duograph.server.bench_scheduler import main

if __name__ == "__main__":
    main()
