"""The CPU worker: a process of its own that answers block attention through shared memory.

Needs neither torch nor SGLang, unless provider ``torch`` or ``ipex`` is asked for.
"""
