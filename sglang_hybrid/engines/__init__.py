"""Engines execute attention. An engine works on tensors, pages and rows, and does not depend on SGLang."""
