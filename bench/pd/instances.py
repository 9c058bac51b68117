"""A prefill instance of stock SGLang and a decode instance, started at the same time."""

from __future__ import annotations

from pathlib import Path

from bench.free_port import free_port
from bench.side_by_side.configurations import Configuration
from bench.side_by_side.server import Server
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.commands.pd.command_lines import ENVIRONMENT as PD_ENVIRONMENT
from sglang_hybrid.commands.pd.command_lines import WITHOUT_GPU

# health checks must not generate tokens: with one a second, an instance would be busy generating
ENVIRONMENT = PD_ENVIRONMENT | {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
PREFILL, DECODE = "prefill", "decode"


def instance_flags(mode: str, transfer: str, bootstrap: int) -> list[str]:
    """Return SGLang's disaggregation flags. ``bootstrap``: port at which decode instances find the prefill instance."""
    return [
        "--disaggregation-mode", mode, "--disaggregation-transfer-backend", transfer,
        "--disaggregation-bootstrap-port", str(bootstrap), "--page-size", str(BLOCK_TOKENS),
    ]  # fmt: skip


class Instances:
    """A prefill and a decode server. Use as a context manager: both serve inside."""

    def __init__(
        self, prefill: list[str], decode: list[str], configuration: Configuration, stock_backend: str, transfer: str,
        logs: Path, device: str = "cuda",
    ) -> None:  # fmt: skip
        """``prefill``, ``decode``: flags of each instance. ``configuration``: the decode instance's."""
        self.bootstrap = free_port()
        without_gpu = list(WITHOUT_GPU) if device == "cpu" else []
        # on a CPU the plugin provides the page allocator of a prefill instance
        plugins = {"SGLANG_PLUGINS": "sglang_hybrid"} if device == "cpu" else {}
        self.prefill = Server(
            Configuration("prefill", stock_backend),
            [*prefill, *instance_flags(PREFILL, transfer, self.bootstrap), *without_gpu,
             *(["--disable-overlap-schedule"] if without_gpu else [])],
            logs / f"{configuration.name}-prefill.log", logs, ENVIRONMENT | plugins,
        )  # fmt: skip
        self.decode = Server(
            configuration,
            [*decode, *instance_flags(DECODE, transfer, self.bootstrap), *without_gpu],
            logs / f"{configuration.name}-decode.log", logs, ENVIRONMENT | plugins,
        )  # fmt: skip

    def __enter__(self) -> Instances:
        servers = (self.prefill, self.decode)
        started = []
        try:
            for server in servers:
                server.start()
                started.append(server)
            for server in servers:
                server.wait()
        except BaseException:
            for server in reversed(started):
                server.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.decode, self.prefill):
            server.__exit__()

    @property
    def start_seconds(self) -> float:
        return max(self.prefill.start_seconds, self.decode.start_seconds)
