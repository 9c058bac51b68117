"""The tables that ``sglang-hybrid size`` prints."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from size_cases import sizing

from sglang_hybrid.commands.size.answer import answer_of
from sglang_hybrid.commands.size.decode_rate import Rates
from sglang_hybrid.commands.size.quantities import format_bytes
from sglang_hybrid.commands.size.table import print_answer


def printed(*settings: str, rates: Rates | None = None, **machine: Any) -> str:
    output = io.StringIO()
    answer = answer_of(sizing(*settings, **machine), rates or Rates(), 32768, 1024)
    print_answer(answer, Console(file=output, width=100, highlight=False))
    return output.getvalue()


def row(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_requests_and_limits_of_stock_and_hybrid_are_side_by_side() -> None:
    text = printed(gpu_gb=48, host_gb=128)
    stock, hybrid = sizing(gpu_gb=48, host_gb=128).stock(), sizing(gpu_gb=48, host_gb=128).hybrid()
    more = sizing(gpu_gb=48, host_gb=128).double_hybrid().host_bytes
    assert row(text, "requests") == [str(stock.count), str(hybrid.count)]
    assert row(text, "limited by") == ["GPU memory", "host memory"]
    assert f"{2 * hybrid.count} requests:" in text and f"+{format_bytes(more)} host memory" in text


def test_bytes_are_shown_by_kind() -> None:
    text = printed(gpu_gb=48)
    assert row(text, "weights") == ["16.1 GB", "16.1 GB"]
    assert row(text, "KV cache of all requests")[1] == "" == row(text, "resident slots")[0]
    for kind in ("scores", "digests", "sketches", "prefill staging", "graphs and reserve", "KV cache in host memory"):
        assert row(text, kind)[1]


def test_the_rate_is_marked_as_an_estimate_with_its_basis_and_its_errors() -> None:
    text = printed(gpu_gb=48)
    assert "Decode, estimated by bytes, not measured" in text
    assert "those of one H200, 16 Xeon cores" in text and "decode-steps-hybrid.json -5% to +8%" in text
    assert "--pcie" in printed(gpu_gb=48, rates=Rates(pcie_gb_s=25))


def test_the_assumption_about_memory_is_shown() -> None:
    assert "assumed: mem_fraction_static=0.85" in printed(gpu_gb=48)


def test_a_model_that_does_not_fit_has_no_rate_and_no_server() -> None:
    text = printed(gpu_gb=12)
    assert row(text, "requests") == ["0", "0"] and row(text, "step, ms") == ["", ""]
    assert "holds for: " not in text and "1 requests:" in text


def test_quantisation_is_said() -> None:
    assert "quantised by fp8, 8 bits" in printed(quantization_config={"quant_method": "fp8"})
