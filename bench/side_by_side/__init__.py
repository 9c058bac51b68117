"""Parts of bench/throughput.py and other benchmarks that compare servers."""
