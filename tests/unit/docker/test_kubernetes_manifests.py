"""Kubernetes manifests have the fields that the API requires, consistent names, and no unneeded rights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from docker_files import DOCKER, MANIFESTS, Dockerfile, manifest

from sglang_hybrid.config_flags import config_of_arguments
from sglang_hybrid.host import GIB

# Fields without which the API server refuses an object; "*" stands for every element of a list.
REQUIRED = {
    ("apps/v1", "Deployment"): (
        "spec.selector.matchLabels",
        "spec.template.metadata.labels",
        "spec.template.spec.containers.*.name",
        "spec.template.spec.containers.*.image",
        "spec.template.spec.containers.*.ports.*.containerPort",
        "spec.template.spec.containers.*.env.*.name",
        "spec.template.spec.containers.*.volumeMounts.*.name",
        "spec.template.spec.containers.*.volumeMounts.*.mountPath",
        "spec.template.spec.containers.*.startupProbe.httpGet.port",
        "spec.template.spec.containers.*.readinessProbe.httpGet.port",
        "spec.template.spec.containers.*.livenessProbe.httpGet.port",
        "spec.template.spec.volumes.*.name",
    ),
    ("v1", "Service"): ("spec.ports.*.port", "spec.selector"),
    ("v1", "PersistentVolumeClaim"): ("spec.accessModes.*", "spec.resources.requests.storage"),
    ("monitoring.coreos.com/v1", "PodMonitor"): ("spec.selector", "spec.podMetricsEndpoints.*.port"),
}
OBJECTS = {manifest(path)["kind"]: manifest(path) for path in MANIFESTS}
POD = OBJECTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


def values(content: Any, path: list[str]) -> list[Any]:
    """Return the values at ``path``, whose part "*" stands for all elements of a list; None for each missing value."""
    if not path:
        return [content]
    head, *rest = path
    if head == "*":
        assert isinstance(content, list) and content
        return [found for one in content for found in values(one, rest)]
    return values(content.get(head), rest) if isinstance(content, dict) else [None]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_an_object_has_the_fields_that_the_api_requires(path: Path) -> None:
    content = manifest(path)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", content["metadata"]["name"])
    for field in REQUIRED[content["apiVersion"], content["kind"]]:
        assert None not in values(content, field.split(".")), field


def test_service_and_monitor_find_the_pods_by_their_labels_and_port() -> None:
    labels = POD["metadata"]["labels"].items()
    spec = OBJECTS["Deployment"]["spec"]
    monitor, service = OBJECTS["PodMonitor"]["spec"], OBJECTS["Service"]["spec"]
    for selector in (spec["selector"]["matchLabels"], monitor["selector"]["matchLabels"], service["selector"]):
        assert selector.items() <= labels
    (port,) = CONTAINER["ports"]
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == [port["name"]]
    assert [endpoint["path"] for endpoint in monitor["podMetricsEndpoints"]] == ["/metrics"]
    assert [one["targetPort"] for one in service["ports"]] == [port["name"]]
    assert "--enable-metrics" in CONTAINER["args"]


def test_the_service_is_reached_from_inside_the_cluster_only() -> None:
    assert OBJECTS["Service"]["spec"]["type"] == "ClusterIP"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(POD["spec"])
    assert "hostPort" not in CONTAINER["ports"][0]


def test_the_pod_runs_as_the_images_user_without_further_rights() -> None:
    user, group = Dockerfile.read(DOCKER / "Dockerfile.gpu").final.last("USER").text.split(":")
    context = POD["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (int(user), int(group), int(group))
    # with the default policy every start makes cache files group-writable, which trusted_file.py refuses
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    own = CONTAINER["securityContext"]
    assert own["readOnlyRootFilesystem"] is True and own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert POD["spec"]["automountServiceAccountToken"] is False


def test_what_is_mounted_is_a_volume_and_what_the_image_writes_is_mounted() -> None:
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert {*Dockerfile.read(DOCKER / "Dockerfile.gpu").final.last("VOLUME").words(), "/tmp", "/dev/shm"} == set(mounts)
    claims = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "emptyDir" not in volume}
    assert claims == {OBJECTS["PersistentVolumeClaim"]["metadata"]["name"], "models"}


def test_the_memory_of_the_container_holds_the_kv_cache_and_what_is_in_memory_beside() -> None:
    config, _ = config_of_arguments(CONTAINER["args"])
    limits, requests = CONTAINER["resources"]["limits"], CONTAINER["resources"]["requests"]
    assert limits == requests and limits["nvidia.com/gpu"] == "1"
    in_memory = sum(gib(v["emptyDir"]["sizeLimit"]) for v in POD["spec"]["volumes"] if "emptyDir" in v)
    assert config.host_memory_bytes(0) + in_memory < gib(limits["memory"])


def gib(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi")) * GIB
