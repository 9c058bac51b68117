"""``python -m bench.chaos``: random faults hit a real server, whose answers must equal those of an undisturbed run.

Every request is answered once without faults, then again and again while workers are killed, memory is damaged,
pages are reused and requests are aborted. ``same_bits`` makes numbers independent of the batch they are computed in, so
the comparison is exact: one wrong bit anywhere is a finding.
"""
