"""The manifests in deploy/kubernetes/. `make lint-kubernetes` renders them and holds them against schemas."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagewire.embedded.programs import GATEWAY, PIPELINE
from pagewire.shared.process.runtime import CLOSE_WITHIN
from pagewire.shared.security.permissions import ROLES
from pagewire.shared.settings.config import FIELDS, Settings
from pagewire.shared.settings.environment import variable

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
COMMON = yaml.safe_load((FOLDER / "base" / "every-service.yaml").read_text())["spec"]["template"]["spec"]
NOT_SETTINGS = {"PAGEWIRE_NATS_ROUTE_PASSWORD"}
"""Variables of the broker."""


def objects(kind: str) -> dict[str, dict[str, Any]]:
    """Returns the parts of base of one kind, by name."""
    parts = [part for file in (FOLDER / "base").glob("*.yaml") for part in yaml.safe_load_all(file.read_text())]
    return {part["metadata"]["name"]: part for part in parts if part["kind"] == kind}


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_variable_is_a_setting(file: Path) -> None:
    named = set(re.findall(r"\bPAGEWIRE_[A-Z_]+", file.read_text())) - {"PAGEWIRE_DRAIN_TIMEOUT"}
    assert named <= {variable(name) for name in FIELDS} | NOT_SETTINGS


def test_every_service_has_a_deployment_with_its_password_alone_and_probes() -> None:
    deployments = objects("Deployment")
    assert set(deployments) - {"every-service"} == {*PIPELINE, GATEWAY}
    for name in (*PIPELINE, GATEWAY):
        (container,) = pod(deployments[name])["containers"]
        assert container["args"] == ["python", "-m", f"pagewire.services.{name}"]
        assert {"startupProbe", "livenessProbe", "readinessProbe", "resources"} <= set(container)
        keys = set(re.findall(r"'key': '([\w-]+)', 'path'", str(pod(deployments[name])["volumes"])))
        assert keys == {name, "api-keys"} if name == GATEWAY else keys == {name}
    assert set(ROLES) >= {*PIPELINE, GATEWAY}


def test_a_pod_has_time_to_drain() -> None:
    assert COMMON["terminationGracePeriodSeconds"] > Settings().drain_timeout + CLOSE_WITHIN + 5  # 5: preStop


def test_pods_run_as_the_user_of_the_image() -> None:
    user = re.search(r"useradd --uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    for spec in (COMMON, pod(objects("StatefulSet")["nats"])):
        assert spec["securityContext"]["runAsUser"] == int(user[1])
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_every_alert_is_explained() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert alerts == set(
        re.findall(r"^\| `(Pagewire\w+)` \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    )


def test_no_service_of_the_namespace_sets_variables_in_a_pod() -> None:
    """Kubernetes would set PAGEWIRE_PORT=tcp://... beside a Service called pagewire."""
    for spec in (COMMON, pod(objects("StatefulSet")["nats"])):
        assert spec["enableServiceLinks"] is False
