"""Benchmark programs. Run them from the root of the repository, such as ``python -m bench.throughput --help``."""
