"""RULER: NVIDIA's 13 synthetic tasks for long contexts, made by NVIDIA's own programs.

    request          what the command line asks for
    package          NVIDIA's installed package: its tasks, templates and metrics
    generating       runs the package's programs, several at a time
    run_generator    the process in which one of these programs runs
    prompts_file     prompts as token ids, in a file that needs neither package nor tokenizer
    prompts          prompts of a request: from a file, from the cache, or made
    scoring          NVIDIA's two metrics

``nvidia-long-context-eval`` is an optional dependency, the extra ``ruler``.
"""
