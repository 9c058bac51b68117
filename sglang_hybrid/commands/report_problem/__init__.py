"""``sglang-hybrid report-problem``: everything that a bug report needs, in one archive without secrets.

redact       what must not leave the machine, and how it is removed from texts
collect      the parts of a report; a part that cannot be had says why
archive      parts as a .tar.gz file that tells nothing about who made it
main         command line and what a person sees
"""
