"""Decode throughput of two servers: what bench/throughput.py is made of."""
