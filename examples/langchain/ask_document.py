"""Ask about a long document without retrieval: the whole document is in the prompt, through LangChain's ChatOpenAI.

    python ask_document.py DOCUMENT "What is it about?" [--url URL] [--model NAME] [--max-tokens N]

With a long context there is nothing to split, embed and search: the model reads everything.
"""

import argparse
import json
import urllib.request
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "You answer questions about a document, briefly and from the document alone."),
        ("user", "{document}\n\nQuestion: {question}"),
    ]
)


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/models") as reply:
        return str(json.load(reply)["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--model", help="default: the one that the server has")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    model = ChatOpenAI(
        base_url=args.url,
        api_key="none",  # the server's --api-key, if it has one
        model=args.model or served_model(args.url),
        temperature=0,
        max_tokens=args.max_tokens,
    )
    chain = PROMPT | model | StrOutputParser()
    for text in chain.stream({"document": args.document.read_text(encoding="utf-8"), "question": args.question}):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
