"""Running servers that are asked over HTTP: what is scored is what is served. Needs neither torch nor SGLang.

server      one server: its name, what it says about itself, an answer to a prompt
asking      all prompts to all servers, several at a time
evaluate    the evaluation around them
"""
