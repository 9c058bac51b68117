"""``python -m bench.worker``: what block attention gets out of this host's memory."""
