"""Settings of all unit tests: one thread, and the same random cases on every run."""

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other

settings.register_profile("unit", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=100)  # make test-full
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unit"))
