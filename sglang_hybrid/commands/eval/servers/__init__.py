"""Evaluates running servers over HTTP: what is scored is what is served. Needs neither torch nor SGLang.

server      one server: its name, its description of itself, its answer to a prompt
asking      sends all prompts to all servers, several at a time
evaluate    the whole evaluation: makes prompts, asks servers, scores answers, writes the report
"""
