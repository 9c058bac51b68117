"""Compose files refer to existing things, open ports on loopback only, and drop rights that are not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docker_files import COMPOSE_FILES, DOCKER, Dockerfile, compose

ALONE = ("cpu", "gpu", "pd")  # files that work alone; the others are combined with one of these
SERVICES = [(path, name) for path in COMPOSE_FILES for name in compose(path)["services"]]

each_service = pytest.mark.parametrize(("path", "name"), SERVICES, ids=lambda value: getattr(value, "stem", value))


def service(path: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = compose(path)["services"][name]
    return found


def is_addition(path: Path, name: str) -> bool:
    """Return True if the file only adds to a service that another file defines."""
    return "image" not in service(path, name)


def test_every_file_is_there_and_those_for_combination_say_so() -> None:
    names = {path.name.split(".")[1] for path in COMPOSE_FILES}
    assert names == {*ALONE, "monitoring", "worker"}
    for path in COMPOSE_FILES:
        assert ("name" in compose(path)) == (path.name.split(".")[1] in ALONE)


@each_service
def test_images_are_built_from_dockerfiles_that_exist_or_have_a_version(path: Path, name: str) -> None:
    given = service(path, name)
    if is_addition(path, name):
        assert any(name in compose(other)["services"] for other in COMPOSE_FILES if other != path)
        return
    image, _, tag = given["image"].partition(":")
    if image == "sglang-hybrid":
        files = {one["build"]["dockerfile"] for one in compose(path)["services"].values() if "build" in one}
        assert f"docker/Dockerfile.{tag}" in files
        for build in (given["build"],) if "build" in given else ():
            assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
            known = Dockerfile.read(DOCKER / f"Dockerfile.{tag}").final.arguments()
            assert set(build.get("args", {})) <= set(known)
    else:
        assert tag.lstrip("v")[0].isdigit()


@each_service
def test_ports_are_bound_to_loopback(path: Path, name: str) -> None:
    given = service(path, name)
    assert given.get("network_mode") in (None, "none")
    assert "expose" not in given
    for port in given.get("ports", []):
        assert isinstance(port, str) and port.startswith("127.0.0.1:"), port


@each_service
def test_a_service_has_no_rights_that_it_does_not_need(path: Path, name: str) -> None:
    given = service(path, name)
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "userns_mode"} & set(given)
    if is_addition(path, name):
        return
    assert given["read_only"] is True
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"]
    user = given.get("user") or Dockerfile.read(DOCKER / f"Dockerfile.{given['image'].split(':')[1]}").final.last(
        "USER"
    )
    assert int(str(getattr(user, "text", user)).split(":")[0]) > 0


@each_service
def test_volumes_and_services_that_are_named_exist(path: Path, name: str) -> None:
    content = compose(path)
    given = service(path, name)
    for volume in given.get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (DOCKER / source).is_file(), source
        else:
            assert source in content["volumes"], source
    for other in given.get("depends_on", []):
        assert other in content["services"]


def test_a_volume_is_declared_only_if_it_is_used() -> None:
    for path in COMPOSE_FILES:
        used = {volume.split(":")[0] for one in compose(path)["services"].values() for volume in one.get("volumes", [])}
        assert set(compose(path)["volumes"]) <= used, path.name


@each_service
def test_what_is_written_goes_to_volumes_and_tmpfs(path: Path, name: str) -> None:
    given = service(path, name)
    if given.get("image", "").startswith("sglang-hybrid:"):
        mounted = {volume.split(":")[1] for volume in given["volumes"]} if "volumes" in given else set()
        temporary = {entry.split(":")[0] for entry in given["tmpfs"]}
        assert "/tmp" in temporary
        home = Dockerfile.read(DOCKER / f"Dockerfile.{given['image'].split(':')[1]}").final.variables().get("HOME")
        assert home in {None, *mounted, *temporary}


@pytest.mark.parametrize(("file", "name"), [("cpu", "server"), ("gpu", "server"), ("pd", "prefill"), ("pd", "decode")])
def test_servers_have_the_limits_that_they_need(file: str, name: str) -> None:
    given = service(DOCKER / f"compose.{file}.yaml", name)
    assert given["shm_size"] in ("1gb", "8gb")  # Docker's default is 64 MB
    assert given["ulimits"]["core"] == 0 and given["ulimits"]["nofile"] >= 65536
    if file != "cpu":
        assert given["ulimits"]["memlock"] == -1
        (gpu,) = given["deploy"]["resources"]["reservations"]["devices"]
        assert gpu["capabilities"] == ["gpu"] and len(gpu["device_ids"]) == 1
    assert given["init"] is True


def test_server_and_worker_meet_in_one_volume() -> None:
    services = compose(DOCKER / "compose.worker.yaml")["services"]
    (shared,) = services["server"]["volumes"]
    assert shared in services["worker"]["volumes"] and shared.split(":")[1] == "/run/sglang-hybrid"
    for name in ("gpu", "worker"):
        final = Dockerfile.read(DOCKER / f"Dockerfile.{name}").final
        assert "/run/sglang-hybrid" in " ".join(step.text for step in final.all("RUN"))


def test_the_documentation_names_every_file_and_is_short() -> None:
    text = (DOCKER / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    for path in [*COMPOSE_FILES, *DOCKER.glob("Dockerfile.*")]:
        assert f"`{path.name}`" in text
