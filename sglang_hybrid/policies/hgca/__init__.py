"""Policy ``hgca``: a dense window of recent tokens and per-head sets of salient older ones (the paper HGCA)."""
