"""One module for each command of ``sglang-hybrid``, imported when the command runs (see ``sglang_hybrid.cli``)."""
