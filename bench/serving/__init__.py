"""Loads and checks for one running server, used by bench/gpu_serving.py and other benchmarks."""
