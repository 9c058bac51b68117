"""The command line of ``sglang-hybrid report``, its sizes, and the flags that it gives to SGLang."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from pathlib import Path

import pytest
from report_doubles import Sessions

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.report import main as command
from sglang_hybrid.commands.report.machine import auto_size
from sglang_hybrid.commands.report.model import read_model
from sglang_hybrid.commands.report.session.child import answer
from sglang_hybrid.commands.report.session.load import Load, flags_of, kv_bytes_per_token
from sglang_hybrid.commands.report.session.messages import Channel
from sglang_hybrid.commands.report.sizes import SIZES

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "hidden_size": 256, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_report_writes_a_page_a_markdown_file_figures_and_results(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = command.parse(["--size", "tiny", "--model", str(model), "--out", str(out)])
    assert command.write_report(options, Sessions()) == 0
    assert "<h1>" in (out / "report.html").read_text()
    assert (out / "report.md").read_text().startswith("# ")
    assert (out / "figures" / "policies.svg").is_file()
    assert {path.stem for path in (out / "results").glob("*.json")} >= {"policies", "scout-ratio", "speed-stock"}
    assert "report.html" in capsys.readouterr().out


def test_a_failed_experiment_is_in_the_exit_status_and_on_the_page(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = command.parse(
        ["--size", "tiny", "--model", str(model), "--out", str(out), "--only", "scout-ratio,hc-memory"]
    )
    assert command.write_report(options, Sessions(failing=frozenset({"ratios"}))) == 1
    assert "ratios fails &lt;here&gt; &amp; now" in (out / "report.html").read_text()
    assert "scout-ratio failed" in capsys.readouterr().err


def test_only_what_is_asked_for_is_measured(model: Path, tmp_path: Path) -> None:
    sessions = Sessions()
    options = command.parse(["--size", "tiny", "--model", str(model), "--out", str(tmp_path), "--only", "scout-ratio"])
    command.write_report(options, sessions)
    assert sessions.asked == ["ratios"]


def test_an_experiment_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "scout-ratios"]) == 2
    assert "scout-ratio, scout-accuracy" in capsys.readouterr().err


def test_the_list_has_every_experiment_and_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert "hc-memory" in printed
    assert all(field.name in printed for field in dataclasses.fields(SIZES["tiny"]))


def test_numbers_of_a_size_can_be_changed() -> None:
    changed = SIZES["tiny"].changed(["windows=3", "budgets=160,192", "depths=0.5"])
    assert (changed.windows, changed.budgets, changed.depths) == (3, (160, 192), (0.5,))
    for wrong in ("windows", "nonsense=1", "windows=1,2", "windows=x", "windows=-1", "budgets="):
        with pytest.raises(InputError, match="--set"):
            SIZES["tiny"].changed([wrong])


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("context", [1024, 8192, 131072])
def test_every_size_fits_in_a_models_context(name: str, context: int) -> None:
    size = SIZES[name].within(context)
    assert size.prompt_tokens + max(size.decode_tokens, size.ratio_steps) < context
    assert max(*size.lengths, size.fit_tokens) < context
    assert max(*size.speed_lengths, size.batch_length) + size.speed_steps + size.warm_steps < context
    assert size.rate_prompt + size.rate_steps < context
    for budget in (size.budget, *size.budgets):
        assert 160 <= budget < size.prompt_tokens and budget % 32 == 0


def test_the_size_follows_the_machine() -> None:
    gib = 1 << 30
    assert auto_size(gpus=1, cores=16, memory_bytes=128 * gib) == "full"
    assert auto_size(gpus=1, cores=16, memory_bytes=32 * gib) == "small"
    assert auto_size(gpus=0, cores=16, memory_bytes=64 * gib) == "small"
    assert auto_size(gpus=0, cores=2, memory_bytes=24 * gib) == "tiny"


def test_a_model_is_described_by_its_configuration(model: Path) -> None:
    found = read_model(model)
    assert (found.name, found.layers, found.head_dim, found.context, found.has_tokenizer) == ("tiny", 3, 64, 2048, True)
    (model / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    with pytest.raises(InputError, match="does not say layers"):
        read_model(model)


def test_the_pool_holds_the_tokens_that_experiments_need() -> None:
    load = Load("/m", tokens=10_000, rows=4)
    flags = flags_of(load, kv_bytes_per_token(CONFIG), on_gpu=False)
    (memory,) = (
        int(flag.split("=")[2].removesuffix("MiB")) for flag in flags if flag.startswith("--hybrid=host_memory")
    )
    assert memory * (1 << 20) > 10_000 * 3 * 2 * 2 * 64 * 4
    assert "--disable-cuda-graph" in flags and "--device=cpu" in flags
    assert Load.from_json(json.loads(json.dumps(load.as_json()))) == load


def test_stock_and_served_models_have_their_own_engines() -> None:
    stock = flags_of(Load("/m", engine="stock", tokens=500), 1024, on_gpu=False)
    assert "--attention-backend=torch_native" in stock and "--max-total-tokens=500" in stock
    served = flags_of(Load("/m", ("policy=scout",), "served"), 1024, on_gpu=False)
    assert "--attention-backend=hybrid" in served and "--hybrid=worker=none" not in served
    graphs = flags_of(Load("/m", ("policy=scout",), "served", rows=40), 1024, on_gpu=True)
    assert graphs[graphs.index("--cuda-graph-bs-decode") + 1 :][:7] == ["1", "2", "4", "8", "16", "32", "40"]


def test_messages_survive_the_socket_and_its_end() -> None:
    ours, theirs = socket.socketpair()
    here, there = Channel(ours), Channel(theirs)
    sender = threading.Thread(target=here.send, args=({"text": "ü\n" * 100_000, "bad": float("nan")},))
    sender.start()
    received = there.receive()
    sender.join()
    assert received == {"text": "ü\n" * 100_000, "bad": None}
    here.close()
    assert there.receive() is None
    there.close()


def test_a_measurement_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no measurement sing"):
        answer(None, "sing", {}, lambda _text, _part: None)
