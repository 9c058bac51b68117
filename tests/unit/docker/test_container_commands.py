"""Commands of images, compose files and manifests use flags, settings and endpoints that exist."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docker_files import COMPOSE_FILES, DOCKER, DOCKERFILES, MANIFESTS, Dockerfile, compose, manifest

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.cli import COMMANDS
from sglang_hybrid.commands.model.catalogue import CATALOGUE
from sglang_hybrid.commands.pd import command_lines
from sglang_hybrid.config_flags import add_config_flags, config_of_arguments
from sglang_hybrid.env import STRINGS
from sglang_hybrid.integration import BACKEND_NAME

SERVERS = (["python3", "-m", "sglang_hybrid.server"], ["python3", "-m", "sglang.launch_server"])
ROUTER = ["python3", "-m", "sglang_router.launch_router"]
OURS = "sglang-hybrid"
PORT = 30000
ENDPOINTS_OF_OTHERS = {"prometheus": "/-/healthy", "grafana": "/api/health"}


def of_image(image: str) -> Dockerfile | None:
    """Return the Dockerfile of a sglang-hybrid image by the image's tag; None for images of others."""
    name, _, tag = image.partition(":")
    return Dockerfile.read(DOCKER / f"Dockerfile.{tag}") if name == OURS else None


def command_of(entrypoint: list[str] | None, arguments: list[str] | None, image: str) -> list[str]:
    """Return the command line of a container: given parts replace the image's ENTRYPOINT and CMD."""
    file = of_image(image)
    if file is None:
        return list(arguments or [])
    own = file.final.last("CMD").words()
    return [*(entrypoint or file.final.last("ENTRYPOINT").words()), *(own if arguments is None else arguments)]


def commands() -> Iterator[tuple[str, list[str]]]:
    for path in DOCKERFILES:
        final = Dockerfile.read(path).final
        yield path.name, [*final.last("ENTRYPOINT").words(), *final.last("CMD").words()]
    for path in COMPOSE_FILES:
        for name, service in compose(path).get("services", {}).items():
            if "image" in service:
                command = command_of(service.get("entrypoint"), service.get("command"), service["image"])
                yield f"{path.name}: {name}", [str(word) for word in command]
    for path in MANIFESTS:
        for container in containers(manifest(path)):
            yield path.name, command_of(container.get("command"), container.get("args"), container["image"])


def containers(content: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = content["spec"].get("template", {}).get("spec", {}).get("containers", [])
    return found


def flags_of(programs: tuple[list[str], ...]) -> list[tuple[str, list[str]]]:
    return [(where, line[3:]) for where, line in commands() if line[:3] in programs]


@pytest.fixture(scope="module")
def servers_parser() -> argparse.ArgumentParser:
    """Return SGLang's argument parser with the flags that the plugin adds.

    The plugin is not loaded, because it would stay loaded in this process.
    """
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if "--hybrid-config" not in parser.format_help():  # unless another test has loaded the plugin in this process
        add_config_flags(parser)
    backend = parser._option_string_actions["--attention-backend"]
    backend.choices = [*(backend.choices or ()), BACKEND_NAME]
    return parser


def test_every_server_takes_its_flags(servers_parser: argparse.ArgumentParser) -> None:
    lines = flags_of(SERVERS)
    assert len(lines) >= 6
    for where, flags in lines:
        asked, unknown = servers_parser.parse_known_args(["--model-path", "NAME", *flags])  # an image names no model
        assert unknown == [], where
        assert asked.port == PORT and asked.host == "0.0.0.0", where  # noqa: S104  # inside the container
        if asked.disaggregation_mode == "prefill":
            assert asked.page_size == BLOCK_TOKENS and not asked.hybrid


def test_every_setting_is_one() -> None:
    lines = [flags for _, flags in flags_of(SERVERS)]
    assert sum("--hybrid" in " ".join(flags) for flags in lines) >= 5
    for flags in lines:
        config_of_arguments(flags)  # raises ConfigError for an unknown setting
    worker = compose(DOCKER / "compose.worker.yaml", WORKER_PROVIDER="ipex")
    settings = STRINGS.parse(worker["services"]["server"]["environment"]["SGLANG_HYBRID_SET"])
    config, _ = config_of_arguments([part for setting in settings for part in ("--hybrid", setting)])
    final = Dockerfile.read(DOCKER / "Dockerfile.worker").final
    assert config.worker == final.last("ENTRYPOINT").words()[-1] and config.worker_provider == "ipex"


def test_the_default_model_of_the_cpu_server_has_that_name() -> None:
    (flags,) = (line for where, line in commands() if where.startswith("compose.cpu.yaml"))
    assert "--model-path=/models/NAME" in flags
    assert "--model-path=${MODEL:-smollm2}" in (DOCKER / "compose.cpu.yaml").read_text()
    assert "smollm2" in CATALOGUE


def test_commands_of_ours_exist_and_take_their_flags() -> None:
    from cpu_worker.main import _parser

    lines = [line for _, line in commands() if line[:1] == [OURS]]
    assert lines
    for _, command, *flags in lines:
        assert command in COMMANDS
        assert command == "worker" and _parser().parse_args(flags).dir
    for words in re.findall(r"--entrypoint sglang-hybrid \S+ (\w+)", (DOCKER / "README.md").read_text()):
        assert words in COMMANDS


def test_the_router_takes_its_flags_and_finds_both_instances() -> None:
    from sglang_router.launch_router import parse_router_args

    ((_, flags),) = flags_of((ROUTER,))
    asked = parse_router_args(flags)
    services = compose(DOCKER / "compose.pd.yaml")["services"]
    ((prefill, bootstrap),) = asked.prefill_urls
    assert (
        prefill == f"http://prefill:{PORT}"
        and f"--disaggregation-bootstrap-port={bootstrap}" in (services["prefill"]["command"])
    )
    assert asked.decode_urls == [f"http://decode:{PORT}"] and asked.pd_disaggregation
    assert asked.port == PORT and asked.prometheus_port == scraped()["router"]


def test_instances_of_a_set_have_the_environment_that_the_pd_command_gives_them() -> None:
    services = compose(DOCKER / "compose.pd.yaml")["services"]
    for name in ("prefill", "decode"):
        assert services[name]["environment"] == command_lines.ENVIRONMENT
    (container,) = containers(manifest(DOCKER / "kubernetes" / "deployment.yaml"))
    assert {one["name"]: one["value"] for one in container["env"]} == command_lines.ENVIRONMENT


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module.split(".")[0])
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / Path(*module.split(".")[1:])).with_suffix(".py").read_text()


def endpoints_of_sglang() -> set[str]:
    return set(re.findall(r'@app\.\w+\(\s*"(/[^"]*)"', source_of("sglang.srt.entrypoints.http_server")))


def endpoint(words: list[str]) -> tuple[int, str]:
    """Return port and path of the URL in a health check's command."""
    (found,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/-]+)", " ".join(words))
    return int(found[0]), found[1]


def test_health_checks_ask_endpoints_that_exist() -> None:
    for name in ("cpu", "gpu"):
        check = Dockerfile.read(DOCKER / f"Dockerfile.{name}").final.health_check()
        assert endpoint(check) == (PORT, "/health") and "/health" in endpoints_of_sglang()
    for path in COMPOSE_FILES:
        for name, service in compose(path)["services"].items():
            if "healthcheck" not in service:
                assert "image" not in service or of_image(service["image"]), name  # our images have their own
                continue
            port, asked = endpoint(service["healthcheck"]["test"])
            if name in ENDPOINTS_OF_OTHERS:
                assert asked == ENDPOINTS_OF_OTHERS[name] and service["ports"][0].endswith(f":{port}")
            elif name == "router":
                assert (port, asked) == (PORT, "/readiness")  # `sglang-hybrid pd` asks the same endpoint
                assert "/readiness" in source_of("sglang_hybrid.commands.pd.main")
            else:
                assert (port, asked) == (PORT, "/health")
    (container,) = containers(manifest(DOCKER / "kubernetes" / "deployment.yaml"))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_a_health_check_waits_longer_than_sglang_needs_to_say_that_it_is_ill() -> None:
    for path, own in ((DOCKER / "Dockerfile.cpu", 20), (DOCKER / "Dockerfile.gpu", 20)):
        final = Dockerfile.read(path).final
        asks = int(re.findall(r"timeout=(\d+)", final.health_check()[-1])[0])
        assert own < asks < int((final.last("HEALTHCHECK").flag("timeout") or "").rstrip("s"))
    own = int(command_lines.ENVIRONMENT["SGLANG_HEALTH_CHECK_TIMEOUT"])
    check = compose(DOCKER / "compose.pd.yaml")["services"]["decode"]["healthcheck"]
    assert own < int(re.findall(r"timeout=(\d+)", check["test"][-1])[0]) < int(check["timeout"].rstrip("s"))
    (container,) = containers(manifest(DOCKER / "kubernetes" / "deployment.yaml"))
    assert own < container["livenessProbe"]["timeoutSeconds"]


def scraped() -> dict[str, int]:
    """Return the port by service name, for everything that Prometheus scrapes."""
    found = {}
    for job in yaml.safe_load((DOCKER / "monitoring" / "prometheus.yaml").read_text())["scrape_configs"]:
        assert job["metrics_path"] == "/metrics"
        for dns in job["dns_sd_configs"]:
            found.update(dict.fromkeys(dns["names"], dns["port"]))
    return found


def test_prometheus_asks_every_server_that_a_compose_file_has() -> None:
    servers = {
        name
        for path in COMPOSE_FILES
        for name, service in compose(path)["services"].items()
        if "--enable-metrics" in service.get("command", [])
    }
    assert servers == {"server", "prefill", "decode"}
    assert scraped() == {**dict.fromkeys(servers, PORT), "router": 29000}
