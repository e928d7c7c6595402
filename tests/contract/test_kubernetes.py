"""deploy/kubernetes: valid for the schemas of Kubernetes, sound among themselves, and with settings that are known."""

import re
from argparse import ArgumentParser
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvlease.registry.config import RegistryConfig
from kvlease.router.config import RouterConfig
from kvlease.runtime.config import add_config_arguments, load_config
from kvlease.sidecar.config import SidecarConfig

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
VERSIONS = ("1.29", "1.33")
CONFIGS = {"registry": RegistryConfig, "router": RouterConfig, "sidecar": SidecarConfig}

OBJECTS: list[dict[str, Any]] = [
    document
    for name in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((FOLDER / name).read_text())
]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [document for document in OBJECTS if document["kind"] in kinds]


WORKLOADS = of_kind("Deployment", "StatefulSet")
OPERATOR: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "operator" / "operator.yaml").read_text()))


def containers_of(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = workload["spec"]["template"]["spec"]
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def labels_of(workload: dict[str, Any]) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def selects(selector: dict[str, Any], workload: dict[str, Any]) -> bool:
    return selector.items() <= labels_of(workload).items()


def named(document: dict[str, Any]) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", [*OBJECTS, *OPERATOR], ids=named)
def test_an_object_is_what_the_schema_of_kubernetes_says(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_refuses_a_field_that_it_does_not_know() -> None:
    broken = deepcopy(WORKLOADS[0])
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_every_file_of_the_folder_is_part_of_the_kustomization() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])
    assert all(document["metadata"].get("namespace", "kvlease") == "kvlease" for document in OBJECTS)


@pytest.mark.parametrize("document", of_kind("Service", "PodDisruptionBudget", "NetworkPolicy"), ids=named)
def test_every_selector_finds_pods(document: dict[str, Any]) -> None:
    spec = document["spec"]
    selector = spec.get("podSelector", spec.get("selector", {}))
    assert any(
        selects(selector.get("matchLabels", {} if "podSelector" in spec else selector), workload)
        for workload in WORKLOADS
    )


@pytest.mark.parametrize("workload", WORKLOADS, ids=named)
def test_a_workload_survives_the_loss_of_a_pod_and_selects_its_own(workload: dict[str, Any]) -> None:
    spec = workload["spec"]
    assert spec["replicas"] >= 2
    assert selects(spec["selector"]["matchLabels"], workload)
    budgets = [
        budget
        for budget in of_kind("PodDisruptionBudget")
        if selects(budget["spec"]["selector"]["matchLabels"], workload)
    ]
    assert len(budgets) == 1


@pytest.mark.parametrize("workload", WORKLOADS, ids=named)
def test_every_container_has_probes_limits_and_no_rights_that_it_does_not_need(
    workload: dict[str, Any],
) -> None:
    pod = workload["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    for container in containers_of(workload):
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
        assert container["resources"]["limits"]["memory"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert re.search(r":\d+\.\d+\.\d+", container["image"])


@pytest.mark.parametrize("workload", WORKLOADS, ids=named)
def test_what_a_container_mounts_is_there_and_ports_that_probes_ask_are_its_own(
    workload: dict[str, Any],
) -> None:
    volumes = {volume["name"] for volume in workload["spec"]["template"]["spec"]["volumes"]}
    for container in containers_of(workload):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        ports = {port["containerPort"] for port in container["ports"]}
        probes = [container[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
        asked = {probe["tcpSocket"]["port"] for probe in probes if "tcpSocket" in probe}
        asked |= {int(port) for probe in probes for port in re.findall(r":(\d{4})\b", str(probe.get("exec")))}
        assert asked <= ports


def settings_of(container: dict[str, Any]) -> dict[str, str]:
    """The environment of a container; what the cluster fills in has a likely value."""
    (settings,) = of_kind("ConfigMap")
    values = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        reference = source.get("configMapKeyRef")
        values[entry["name"]] = (
            settings["data"][reference["key"]] if reference else entry.get("value", "pod-0")
        )
    return values


def service_links(workload: dict[str, Any]) -> dict[str, str]:
    """What Kubernetes puts into the environment of each pod for every service with an address, unless told not to."""
    if not workload["spec"]["template"]["spec"].get("enableServiceLinks", True):
        return {}
    names = [
        service["metadata"]["name"].upper().replace("-", "_")
        for service in of_kind("Service")
        if service["spec"].get("clusterIP") != "None"
    ]
    return {f"{name}_SERVICE_HOST": "10.0.0.1" for name in names} | {
        f"{name}_PORT": "tcp://x" for name in names
    }


@pytest.mark.parametrize(
    ("workload", "container"),
    [
        (workload, container)
        for workload in WORKLOADS
        for container in containers_of(workload)
        if container["name"] in CONFIGS
    ],
    ids=lambda part: part["name"] if "name" in part else named(part),
)
def test_the_settings_of_a_container_are_known_and_fit_together(
    workload: dict[str, Any], container: dict[str, Any]
) -> None:
    process, *arguments = container["args"]
    environment = settings_of(container) | service_links(workload)
    filled = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], part) for part in arguments]
    parser = ArgumentParser()
    add_config_arguments(parser, CONFIGS[process])
    config: Any = load_config(CONFIGS[process], process, parser.parse_args(filled), environment)
    assert config.tls_dir == "/etc/kvlease/tls"
    assert config.tls_dir in {mount["mountPath"] for mount in container["volumeMounts"]}
    grace_s = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert config.stop_grace_s < grace_s


def test_each_engine_and_its_sidecar_share_the_directory_of_the_socket() -> None:
    for workload in of_kind("StatefulSet"):
        sidecar, engine = containers_of(workload)
        (socket_dir,) = [part.split("=")[1] for part in sidecar["args"] if part.startswith("--socket-dir=")]
        assert f'"socket_dir":"{socket_dir}"' in next(
            part for part in engine["args"] if "KvleaseConnector" in part
        )
        assert "engine_id" not in str(engine["args"])
        mounts = [
            {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}["socket"]
            for container in (sidecar, engine)
        ]
        assert mounts[0] == mounts[1]
        assert socket_dir.startswith(f"{mounts[0]}/")


def test_only_engines_reach_the_ports_of_engines_that_ask_nobody_who_comes() -> None:
    allowed = [
        (peer, port["port"])
        for policy in of_kind("NetworkPolicy")
        if any(
            selects(policy["spec"]["podSelector"].get("matchLabels", {}), workload)
            for workload in of_kind("StatefulSet")
        )
        for rule in policy["spec"].get("ingress", [])
        for peer in rule["from"]
        for port in rule["ports"]
    ]
    engines = {"podSelector": {"matchLabels": {"kvlease.io/engine": "true"}}}
    assert [peer for peer, port in allowed if port in (5600, 32768)] == [engines, engines]
    routers = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvlease-router"}}}
    assert [peer for peer, port in allowed if port == 8000] == [routers]
    registries = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvlease-registry"}}}
    operators = {"namespaceSelector": {"matchLabels": {"kvlease.io/operator": "true"}}}
    assert [peer for peer, port in allowed if port == 7720] == [registries, operators, engines]


def test_a_client_stays_with_the_router_that_keeps_its_responses() -> None:
    (front,) = [one for one in of_kind("Service") if one["metadata"]["name"] == "kvlease-router"]
    assert front["spec"]["sessionAffinity"] == "ClientIP"


def test_an_engine_gets_the_token_for_its_model_where_there_is_one() -> None:
    for workload in of_kind("StatefulSet"):
        _, engine = containers_of(workload)
        (token,) = [one["valueFrom"]["secretKeyRef"] for one in engine["env"] if one["name"] == "HF_TOKEN"]
        assert token["optional"]


def test_a_router_starts_without_a_secret_of_keys_and_reads_one_where_the_settings_say() -> None:
    (router,) = [one for one in WORKLOADS if one["metadata"]["name"] == "kvlease-router"]
    (volume,) = [one for one in router["spec"]["template"]["spec"]["volumes"] if one["name"] == "keys"]
    assert volume["secret"]["optional"]
    (container,) = containers_of(router)
    (mount,) = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "keys"]
    assert settings_of(container)["KVLEASE_ROUTER_KEYS_FILE"] == ""
    assert f"{mount}/keys.toml" in (FOLDER / "settings.yaml").read_text()


def test_the_pod_of_operators_reaches_what_the_policies_let_it_reach_at_ports_of_services() -> None:
    namespace, pod = OPERATOR
    labels = namespace["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    services = {
        f"{one['metadata']['name']}.kvlease.svc:{port['port']}": one["spec"]["selector"]
        for one in of_kind("Service")
        for port in one["spec"]["ports"]
    }
    open_to_it = [
        (policy["spec"]["podSelector"], port["port"])
        for policy in of_kind("NetworkPolicy")
        for rule in policy["spec"].get("ingress", [])
        for peer in rule["from"]
        for port in rule["ports"]
        if "namespaceSelector" in peer and peer["namespaceSelector"]["matchLabels"].items() <= labels.items()
    ]
    addresses = {
        one["name"]: one["value"].removeprefix("https://")
        for one in container["env"]
        if one["name"] != "KVLEASE_TLS_DIR"
    }
    assert addresses.keys() == {"KVLEASE_REGISTRY", "KVLEASE_ROUTER", "KVLEASE_ROUTING"}
    for address in addresses.values():
        port = int(address.partition(":")[2])
        assert ({"matchLabels": services[address]}, port) in open_to_it
    assert {volume["name"] for volume in pod["spec"]["volumes"]} == {
        mount["name"] for mount in container["volumeMounts"]
    }
