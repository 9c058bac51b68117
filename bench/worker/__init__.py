"""``python -m bench.worker``: benchmark of the CPU worker's block attention against this host's memory bandwidth."""
