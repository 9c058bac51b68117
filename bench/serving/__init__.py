"""Load generators and checks for a running server, used by bench/gpu_serving.py and other benchmarks."""
