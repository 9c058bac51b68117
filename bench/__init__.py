"""Benchmarks. Each is a program that runs from the root of the repository: ``python -m bench.throughput --help``."""
