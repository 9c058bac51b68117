"""``sglang-hybrid pd``: a prefill instance, a decode instance and a router on this machine. See docs/pd.md."""
