"""The CPU worker: a separate process that computes attention over blocks, and answers through shared memory.

The worker needs neither torch nor SGLang, unless provider ``torch`` or ``ipex`` is chosen.
"""
