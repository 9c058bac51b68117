"""The design's gates 1 and 2 without servers: what bench/gpu_gates.py is made of."""
