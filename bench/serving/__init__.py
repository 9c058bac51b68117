"""What bench/gpu_serving.py does to one running server."""
