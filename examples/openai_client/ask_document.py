"""Ask questions about a long document: streamed chats through the official OpenAI client.

    python ask_document.py DOCUMENT "What is it about?" "Who wrote it?" [--url URL] [--max-tokens N]

The document stands at the beginning of every prompt. The server computes it once: later questions find it in the prefix
cache, and begin to be answered at once.
"""

import argparse
import sys
import time
from pathlib import Path

from openai import OpenAI


def messages(document: str, question: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "You answer questions about a document, briefly and from the document alone."},
        {"role": "user", "content": f"{document}\n\nQuestion: {question}"},
    ]


def ask(client: OpenAI, model: str, document: str, question: str, max_tokens: int) -> None:
    started = time.monotonic()
    first = None
    chunks = client.chat.completions.create(
        model=model, messages=messages(document, question), max_tokens=max_tokens, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in chunks:
        for choice in chunk.choices:
            if text := choice.delta.content:
                first = first or time.monotonic() - started
                print(text, end="", flush=True)
        if chunk.usage:  # the last chunk has it, and no text
            used = chunk.usage
    print()
    counted = f"{used.prompt_tokens} tokens of prompt, {used.completion_tokens} of answer"
    print(f"[{counted}, first one after {first or 0:.1f} s]", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none")  # the server's --api-key, if it has one
    model = client.models.list().data[0].id
    for question in args.questions:
        ask(client, model, args.document.read_text(encoding="utf-8"), question, args.max_tokens)


if __name__ == "__main__":
    main()
