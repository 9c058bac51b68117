"""Parts of bench/gpu_gates.py, which compares logits of hybrid with stock SGLang's (gates 1 and 2) without servers."""
