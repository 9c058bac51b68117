"""Prefill and decode instances of a disaggregated set, on one machine."""
