"""The process that holds a model: ``python -m sglang_hybrid.commands.report.session.child FD``.

The process reads what to load, then serves one request after another, and ends when the report ends. The module of a
measurement is imported at its first request.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.report.session.load import Load, flags_of, kv_bytes_per_token
from sglang_hybrid.commands.report.session.messages import Channel, Tell

_MEASUREMENTS = "sglang_hybrid.commands.report.session"
OPERATIONS = ("evaluate", "ratios", "speed", "rate", "cosines", "breakdown")


def main() -> int:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    loading = channel.receive()
    if loading is None:
        return 1
    try:
        session = _load(Load.from_json(loading["load"]))
    except BaseException as error:
        _send_error(channel, error)
        return 1
    channel.send(
        {"result": {"context": session.model.model_config.context_len, "tokens": session.model.capacity_tokens}}
    )
    while (request := channel.receive()) is not None:
        try:
            tell = lambda text, part: channel.send({"progress": text, "part": part})  # noqa: E731
            channel.send({"result": answer(session, request["operation"], request["arguments"], tell)})
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            _send_error(channel, error)
    return 0


def answer(session: Any, operation: str, arguments: Mapping[str, Any], tell: Tell) -> Any:
    if operation not in OPERATIONS:
        raise ValueError(f"there is no measurement {operation}: there are {', '.join(OPERATIONS)}")
    module = importlib.import_module(f"{_MEASUREMENTS}.{'speed' if operation == 'rate' else operation}")
    return getattr(module, operation)(session, tell=tell, **arguments)


def _load(load: Load) -> Any:
    import torch

    from sglang_hybrid.commands.report.session.loaded import Loaded
    from sglang_hybrid.integration.model_session import ModelSession

    on_gpu = torch.cuda.is_available() if load.device is None else load.device.startswith("cuda")
    config = json.loads(Path(load.model, "config.json").read_text(encoding="utf-8"))
    flags = flags_of(load, kv_bytes_per_token(config), on_gpu=on_gpu)
    return Loaded(ModelSession(flags, changes=load.engine == "any"), load, on_gpu=on_gpu)


def _send_error(channel: Channel, error: BaseException) -> None:
    traceback.print_exc()
    words = str(error).strip() or type(error).__name__
    if type(error).__module__.partition(".")[0] != "sglang_hybrid":  # errors of this package are sentences already
        words = f"{type(error).__name__}: {words}"
    channel.send({"error": words[:2000]})


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    status = main()
    # SGLang's threads and exit handlers have nothing to save
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
