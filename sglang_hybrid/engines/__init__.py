"""How attention is executed. An engine knows tensors, pages and rows; it knows nothing of SGLang."""
