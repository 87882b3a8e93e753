"""Manifests of deploy/kubernetes: valid, consistent, without privileges, and with settings that the services have.

No cluster runs here. `kubernetes-validate` has the schemas of Kubernetes; of custom resources, the fields that are used
are compared with a list.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_manifests as manifests
import pytest
import yaml
from kubernetes_manifests import BUILDS, CUSTOM, KUBERNETES, ROOT, RUNS, Manifest, Pod

from starling.cli.launch.interface import Placement
from starling.cli.launch.kubernetes.manifests import manifests as launched
from starling.cli.launch.settings import KubernetesSettings
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.common.observe.process import STOP_S
from starling.common.service import SECTIONS, parse_arguments
from starling.common.settings import ServiceSettings, load
from starling.controller.settings import ControllerProcess
from starling.policy.shell.loading import PolicyProcess
from starling.reward.shell.main import RewardProcess
from starling.rollout.settings import RolloutProcess

SCHEMAS: Final[dict[str, type[ServiceSettings]]] = {
    "controller": ControllerProcess,
    "policy": PolicyProcess,
    "rollout": RolloutProcess,
    "reward": RewardProcess,
}
VERSIONS: Final = ("1.29", "1.37")
"""Of Kubernetes: the first with restartable init containers by default, and the newest whose schemas are known."""
GRACE_S: Final = 10.0
"""What is left of a grace period when a service has used up its own time."""
ELSEWHERE: Final = {("Secret", "reward-redis"), ("Secret", "reward-token")}
"""Resources that the user makes, in the namespace of the reward service."""


@pytest.fixture(scope="session")
def validator() -> Path:
    """Return the command `kubernetes-validate`, in an environment of its own."""
    folder = ROOT / "build/kubernetes-validate"
    command = folder / "bin/kubernetes-validate"
    if not command.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [folder / "bin/pip", "install", "--quiet", "kubernetes-validate==1.37.0"]
        subprocess.run(install, check=True, timeout=600)
    return command


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """Return the Secrets, with new keys."""
    return manifests.build_secrets(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="session")
def built() -> dict[str, list[Manifest]]:
    """Return what each folder builds."""
    return {name: manifests.build(KUBERNETES / name) for name in BUILDS}


def validate(command: Path, documents: list[Manifest], file: Path, version: str) -> None:
    """Validate documents against the schemas of one version of Kubernetes."""
    file.write_text(yaml.safe_dump_all(documents))
    arguments = [command, "--strict", "--kubernetes-version", version, file]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"Kubernetes {version}: {done.stdout}{done.stderr}"


def as_known_kinds(documents: list[Manifest]) -> Iterator[Manifest]:
    """Yield documents of kinds that Kubernetes has, and the pods and jobs in custom ones as such."""
    for one in documents:
        name = one["metadata"]["name"]
        if one["kind"] == "JobSet":
            for job in one["spec"]["replicatedJobs"]:
                spec = job["template"]["spec"]
                yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, "spec": spec}
        elif one["kind"] == "LeaderWorkerSet":
            template = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            metadata = {"name": name, **template["metadata"]}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        elif one["kind"] not in CUSTOM:
            yield one


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", BUILDS)
def test_built_manifests_have_the_schemas_of_kubernetes(
    name: str, version: str, built: dict[str, list[Manifest]], validator: Path, tmp_path: Path
) -> None:
    validate(validator, list(as_known_kinds(built[name])), tmp_path / "built.yaml", version)


@pytest.mark.parametrize(("role", "num_nodes"), [("rollout", 1), ("rollout", 2), ("reward", 1), ("teacher", 1)])
def test_objects_of_the_launcher_have_the_schemas_of_kubernetes(
    role: str, num_nodes: int, validator: Path, tmp_path: Path
) -> None:
    placement = Placement(
        name=f"{role}-0",
        role=role,
        arguments=(),
        num_gpus=2,
        num_nodes=num_nodes,
        gpu_kind="h100",
        partition="fast",
        node_selector={"zone": "a"},
        controller="tcp://10.0.0.1:5555",
    )
    settings = KubernetesSettings(models_claim="models")
    files = {"config.toml": "[run]\n", "key.json": "{}"}
    objects = launched(placement, settings, name=f"one-{role}-0-1", run="one/1", files=files)
    for version in VERSIONS:
        validate(validator, objects["items"], tmp_path / "launched.yaml", version)


def single_files() -> Iterator[Path]:
    """Yield the files that kustomizations list as resources: each is a manifest by itself."""
    for path in sorted(KUBERNETES.rglob("kustomization.yaml")):
        for name in yaml.safe_load(path.read_text()).get("resources", ()):
            if name.endswith(".yaml"):
                yield path.parent / name


def test_single_files_and_secrets_have_the_schemas_of_kubernetes(
    secrets: list[Manifest], validator: Path, tmp_path: Path
) -> None:
    documents = list(secrets)
    for path in single_files():
        documents += yaml.safe_load_all(path.read_text())
    assert len(documents) > 40
    validate(validator, list(as_known_kinds(documents)), tmp_path / "files.yaml", VERSIONS[-1])


@pytest.mark.parametrize("name", ["user-namespaces", "join-from-outside"])
def test_components_that_no_overlay_has_fit_one(name: str, validator: Path, tmp_path: Path) -> None:
    kubernetes = os.path.relpath(KUBERNETES, tmp_path)
    overlay = {"resources": [f"{kubernetes}/overlays/cpu"], "components": [f"{kubernetes}/components/{name}"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    documents = manifests.build(tmp_path)
    validate(validator, list(as_known_kinds(documents)), tmp_path / "built.yaml", VERSIONS[-1])
    if name == "user-namespaces":
        with_users = {pod.role for pod in manifests.pods(documents) if pod.spec.get("hostUsers") is False}
        assert with_users == {"rollout", "reward"}


def test_an_unknown_field_is_noticed(built: dict[str, list[Manifest]], validator: Path, tmp_path: Path) -> None:
    policy = json.loads(json.dumps(manifests.find(built["overlays/cpu"], "StatefulSet", "policy")))
    policy["spec"]["template"]["spec"]["terminationGraceSeconds"] = 30
    with pytest.raises(AssertionError, match="terminationGraceSeconds"):
        validate(validator, [policy], tmp_path / "wrong.yaml", VERSIONS[-1])


# --- Custom resources: the fields that are used, of JobSet v1alpha2, LeaderWorkerSet v1 and monitoring.coreos.com/v1 -

ANY: Final = object()
SELECTOR: Final = {"matchLabels": ANY, "matchExpressions": [{"key": str, "operator": str, "values": [str]}]}
ENDPOINT: Final = {
    "port": str,
    "path": str,
    "interval": str,
    "authorization": {"credentials": {"name": str, "key": str}},
    "relabelings": [{"action": str, "sourceLabels": [str], "targetLabel": str, "replacement": str}],
}
JOB_RULE: Final = {"name": str, "action": str, "onJobFailureReasons": [str]}
FIELDS: Final[dict[str, Any]] = {
    "JobSet": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "failurePolicy": {"maxRestarts": int, "rules": [JOB_RULE]},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": ANY}}],
    },
    "LeaderWorkerSet": {
        "replicas": int,
        "startupPolicy": str,
        "leaderWorkerTemplate": {"size": int, "restartPolicy": str, "workerTemplate": {"metadata": ANY, "spec": ANY}},
    },
    "PodMonitor": {"selector": SELECTOR, "podMetricsEndpoints": [ENDPOINT]},
    "ServiceMonitor": {"selector": SELECTOR, "endpoints": [ENDPOINT]},
    "PrometheusRule": {"groups": [{"name": str, "rules": [ANY]}]},
}
VALUES: Final = {
    "operator": {"All", "Any", "In"},
    "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "replace"},
    "startupPolicy": {"LeaderCreated", "LeaderReady"},
    "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
}
API: Final = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}


def check_fields(value: Any, known: Any, where: str) -> None:
    """Compare a value with the known fields and types."""
    if known is ANY:
        return
    if isinstance(known, dict):
        assert isinstance(value, dict), where
        for key, inner in value.items():
            assert key in known, f"{where} has {key}, which is not known"
            check_fields(inner, known[key], f"{where}.{key}")
            if key in VALUES and isinstance(inner, str):
                assert inner in VALUES[key], f"{where}.{key} is {inner}"
    elif isinstance(known, list):
        assert isinstance(value, list), where
        for inner in value:
            check_fields(inner, known[0], where)
    else:
        assert type(value) is known, f"{where} is {value!r}"


@pytest.mark.parametrize("name", BUILDS)
def test_custom_resources_have_known_fields_only(name: str, built: dict[str, list[Manifest]]) -> None:
    for one in manifests.of_kind(built[name], *CUSTOM):
        assert one["apiVersion"] == API[one["kind"]]
        check_fields(one["spec"], FIELDS[one["kind"]], one["kind"])


def test_a_jobset_names_its_own_jobs(built: dict[str, list[Manifest]]) -> None:
    spec = manifests.find(built["overlays/jobset"], "JobSet", "run")["spec"]
    jobs = {job["name"]: job for job in spec["replicatedJobs"]}
    assert set(spec["successPolicy"]["targetReplicatedJobs"]) <= set(jobs)
    [policy] = [pod for pod in manifests.pods(built["overlays/jobset"]) if pod.role == "policy"]
    arguments = policy.spec["containers"][0]["args"]
    assert f"--rdzv=run-policy-0-0.{spec['network']['subdomain']}:29400" in arguments
    assert f"--nnodes={jobs['policy']['template']['spec']['completions']}" in arguments


# --- What names what -------------------------------------------------------------------------------------------------


def references(pod: Pod) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and key (or "") of each ConfigMap, Secret and claim that a pod names."""
    for volume in pod.spec.get("volumes", ()):
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            yield "ConfigMap", name, ""
            yield from (("ConfigMap", name, item["key"]) for item in volume["configMap"].get("items", ()))
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"], ""
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], ""
    for container in pod.containers:
        for variable in container.get("env", ()):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                source = variable["valueFrom"]["secretKeyRef"]
                yield "Secret", source["name"], source["key"]


@pytest.mark.parametrize("name", BUILDS)
def test_named_objects_exist(name: str, built: dict[str, list[Manifest]], secrets: list[Manifest]) -> None:
    known = {(one["kind"], one["metadata"]["name"]): one for one in built[name]}
    assert len(known) == len(built[name]), "two objects have one name"
    if "reward" not in name:
        known |= {(one["kind"], one["metadata"]["name"]): one for one in secrets}
    for pod in manifests.pods(built[name]):
        for kind, wanted, key in references(pod):
            if "reward" in name and (kind, wanted) in ELSEWHERE:
                continue
            assert (kind, wanted) in known, f"{pod.workload} names {kind}/{wanted}, which nothing makes"
            assert not key or key in known[kind, wanted]["data"], f"{kind}/{wanted} has no {key}"
    for monitor in manifests.of_kind(built[name], "PodMonitor", "ServiceMonitor"):
        for endpoint in monitor["spec"].get("podMetricsEndpoints", monitor["spec"].get("endpoints")):
            token = endpoint.get("authorization", {}).get("credentials")
            assert token is None or ("Secret", token["name"]) in {*known, *ELSEWHERE}


@pytest.mark.parametrize("name", BUILDS)
def test_objects_are_in_one_namespace(name: str, built: dict[str, list[Manifest]], secrets: list[Manifest]) -> None:
    [namespace] = [one["metadata"]["name"] for one in manifests.of_kind(built[name], "Namespace")]
    others = [one for one in built[name] if one["kind"] != "Namespace"]
    assert {one["metadata"]["namespace"] for one in others} == {namespace}
    if "reward" not in name:
        assert {one["metadata"]["namespace"] for one in secrets} == {namespace}


@pytest.mark.parametrize("name", BUILDS)
def test_volumes_are_mounted_where_they_exist(name: str, built: dict[str, list[Manifest]]) -> None:
    for pod in manifests.pods(built[name]):
        volumes = [one["name"] for one in pod.spec.get("volumes", ())]
        volumes += [one["metadata"]["name"] for one in pod.claims]
        assert len(volumes) == len(set(volumes)), f"{pod.workload} has two volumes of one name"
        mounted = set()
        for container in pod.containers:
            mounts = container.get("volumeMounts", [])
            places = [mount["mountPath"] for mount in mounts]
            assert len(places) == len(set(places)), f"{pod.workload} mounts twice at one place"
            mounted |= {mount["name"] for mount in mounts}
        assert mounted == set(volumes), f"{pod.workload}: {mounted ^ set(volumes)}"


@pytest.mark.parametrize("name", BUILDS)
def test_selectors_and_ports_lead_to_pods(name: str, built: dict[str, list[Manifest]]) -> None:
    templates = list(manifests.pods(built[name]))

    def chosen(selector: Manifest) -> list[Pod]:
        return [pod for pod in templates if manifests.selects(selector, pod.labels)]

    def has_port(selected: list[Pod], port: str | int) -> bool:
        ports = [port for pod in selected for one in pod.containers for port in one.get("ports", ())]
        return any(port in (one["containerPort"], one.get("name")) for one in ports)

    for one in built[name]:
        spec, what = one.get("spec", {}), f"{one['kind']}/{one['metadata']['name']}"
        match one["kind"]:
            case "Service":
                selected = chosen({"matchLabels": spec["selector"]})
                assert selected, what
                assert all(has_port(selected, port["targetPort"]) for port in spec.get("ports", ())), what
            case "StatefulSet" | "Deployment":
                assert manifests.selects(spec["selector"], spec["template"]["metadata"]["labels"]), what
                if one["kind"] == "StatefulSet":
                    manifests.find(built[name], "Service", spec["serviceName"])
            case "PodDisruptionBudget":
                assert chosen(spec["selector"]), what
                kinds = {pod.workload.partition("/")[0] for pod in chosen(spec["selector"])}
                # Of pods of other workloads, Kubernetes does not know how many there should be.
                assert kinds <= {"StatefulSet", "Deployment"} or type(spec.get("minAvailable")) is int, what
            case "NetworkPolicy":
                assert chosen(spec["podSelector"]), what
                for rule in spec.get("ingress", ()):
                    named = [port["port"] for port in rule.get("ports", ())]
                    assert all(has_port(chosen(spec["podSelector"]), port) for port in named), what
            case "HorizontalPodAutoscaler":
                target = spec["scaleTargetRef"]
                scaled = manifests.find(built[name], target["kind"], target["name"])
                assert spec["minReplicas"] <= scaled["spec"]["replicas"] <= spec["maxReplicas"], what
            case "PodMonitor":
                selected = chosen(spec["selector"])
                assert all(has_port(selected, end["port"]) for end in spec["podMetricsEndpoints"]), what
            case "ServiceMonitor":
                services = manifests.of_kind(built[name], "Service")
                found = [one for one in services if manifests.selects(spec["selector"], one["metadata"]["labels"])]
                ports = {port["name"] for service in found for port in service["spec"]["ports"]}
                assert all(end["port"] in ports for end in spec["endpoints"]), what


@pytest.mark.parametrize("name", BUILDS)
def test_probes_name_ports_of_their_container(name: str, built: dict[str, list[Manifest]]) -> None:
    for pod in manifests.pods(built[name]):
        for container in pod.containers:
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for check in ("httpGet", "tcpSocket"):
                    found = container.get(probe, {}).get(check)
                    assert found is None or found["port"] in ports, f"{pod.workload} {probe}"


def test_each_rollout_that_may_be_started_has_a_key(built: dict[str, list[Manifest]], secrets: list[Manifest]) -> None:
    keys = set(manifests.find(secrets, "Secret", "rollout-keys")["data"])
    for name in RUNS:
        found = built[f"overlays/{name}"]
        counts = [one["spec"]["maxReplicas"] for one in manifests.of_kind(found, "HorizontalPodAutoscaler")]
        counts += [one["spec"]["replicas"] for one in manifests.of_kind(found, "LeaderWorkerSet")]
        workloads = manifests.of_kind(found, "StatefulSet")
        counts += [one["spec"]["replicas"] for one in workloads if one["metadata"]["name"] == "rollout"]
        for jobset in manifests.of_kind(found, "JobSet"):
            counts += [job["replicas"] for job in jobset["spec"]["replicatedJobs"] if job["name"] == "rollout"]
        assert counts
        assert {f"rollout-{number}.json" for number in range(max(counts))} <= keys


# --- Images ----------------------------------------------------------------------------------------------------------


def test_images_are_those_of_the_bake_file(built: dict[str, list[Manifest]]) -> None:
    bake = ROOT / "deploy/images/docker-bake.hcl"
    if not bake.exists():
        pytest.skip(f"{bake} does not exist")
    text = bake.read_text()
    found = re.findall(r'"\$\{PREFIX\}([^"]+)"', text)
    tags = {tag.replace("${VERSION}", "dev") for tag in found}
    assert len(tags) >= 6, tags
    for name in BUILDS:
        for pod in manifests.pods(built[name]):
            for container in pod.containers:
                assert container["image"] in tags, f"{name}: {pod.workload} has {container['image']}"


# --- Privileges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILDS)
def test_pods_run_without_privileges(name: str, built: dict[str, list[Manifest]]) -> None:
    """What the profile `restricted` of Pod Security asks for, and a read-only file system of the image."""
    for pod in manifests.pods(built[name]):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] >= 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod.spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"}
        assert pod.spec["automountServiceAccountToken"] is False
        # The variables of a Service whose name begins with `starling` would be unknown settings.
        assert pod.spec["enableServiceLinks"] is False
        for volume in pod.spec.get("volumes", ()):
            assert volume.keys() & {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}, volume
        for container in pod.containers:
            own = container["securityContext"]
            assert own == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert all("hostPort" not in port for port in container.get("ports", ()))
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
    for namespace in manifests.of_kind(built[name], "Namespace"):
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("name", [f"overlays/{name}" for name in RUNS])
def test_code_of_completions_has_another_user_than_the_run(name: str, built: dict[str, list[Manifest]]) -> None:
    users = {pod.role: pod.spec["securityContext"]["runAsUser"] for pod in manifests.pods(built[name])}
    assert users["controller"] == users["policy"] == 10001
    assert len({users["policy"], users["rollout"], users["reward"]}) == 3


# --- Settings --------------------------------------------------------------------------------------------------------


def service_of(container: Manifest) -> str:
    """Return the role of the service that a container runs; "" for another program."""
    found = re.search(r"\bstarling-(\w+)\b", " ".join(container.get("command", ())))
    return found[1] if found is not None and found[1] in SCHEMAS else ""


def read_settings(pod: Pod, container: Manifest, config: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """Read the settings of a container as its service does: the configuration, the environment and the flags."""
    role = service_of(container)
    variables = manifests.environment(container, pod)
    for name in [name for name in os.environ if name.startswith("STARLING_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        if name != "HOME":
            monkeypatch.setenv(name, value)
    arguments = [manifests.expanded(one, variables) for one in container["args"]]
    for flag in re.findall(r"--reward\.http\.port=\$\(\(([^)]*)\)\)?", " ".join(container["command"])):
        assert flag.startswith("8080 - "), flag
        arguments.append("--reward.http.port=8080")
    arguments = [re.sub(r"/etc/starling/\w+\.toml", str(config), one) for one in arguments]
    parsed = parse_arguments(role, arguments, SCHEMAS[role])
    assert parsed.configs == (config,)
    settings = load(SCHEMAS[role], parsed.configs, parsed.flags, others=SECTIONS)
    monkeypatch.undo()
    return settings


def config_of(documents: list[Manifest], folder: Path) -> Path:
    """Write the configuration of a build's services to a file."""
    [config] = [one for one in manifests.of_kind(documents, "ConfigMap") if "-config" in one["metadata"]["name"]]
    [text] = [text for name, text in config["data"].items() if name.endswith(".toml")]
    path = folder / "config.toml"
    path.write_text(text)
    return path


def all_settings(
    documents: list[Manifest], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[Pod, ServiceSettings]]:
    """Return each service of a build with its pod and settings."""
    config, found = config_of(documents, folder), {}
    for pod in manifests.pods(documents):
        for container in pod.spec["containers"]:
            assert service_of(container), f"{pod.workload} runs {container['command']}"
            found[service_of(container)] = pod, read_settings(pod, container, config, monkeypatch)
    return found


@pytest.mark.parametrize("name", BUILDS)
def test_settings_are_those_of_the_services(
    name: str, built: dict[str, list[Manifest]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = all_settings(built[name], tmp_path, monkeypatch)
    assert set(found) == ({"reward"} if "reward" in name else set(SCHEMAS))
    if "reward" not in name:
        assert {settings.run.id for _, settings in found.values()} != {""}
        _, controller = found["controller"]
        assert (controller.network.port, controller.network.curve) == (5555, True)
    _, reward = found["reward"]
    assert isinstance(reward, RewardProcess)
    assert (reward.reward.http.enabled, reward.reward.http.port, reward.reward.sandbox) == (True, 8080, "landlock")


@pytest.mark.parametrize("name", BUILDS)
def test_grace_periods_are_longer_than_the_services_take(
    name: str, built: dict[str, list[Manifest]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role, (pod, settings) in all_settings(built[name], tmp_path, monkeypatch).items():
        takes_s = STOP_S
        if isinstance(settings, ControllerProcess):
            takes_s = settings.controller.stop_s + settings.controller.drain_s
        elif isinstance(settings, PolicyProcess):
            takes_s = settings.policy.saving.leave_s + 5.0
        assert pod.spec["terminationGracePeriodSeconds"] >= takes_s + GRACE_S, role


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model folder of the quickstart, as `starling scratch` makes it now."""
    folder = tmp_path_factory.mktemp("model") / "quickstart"
    command = [sys.executable, "-m", "starling.cli.main", "scratch", str(ROOT / "recipes/quickstart.toml"), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_the_controller_has_what_a_supervisor_would_derive(
    name: str, built: dict[str, list[Manifest]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`starling run` derives settings of the controller from other sections; here they are in the file."""
    config = config_of(built[f"overlays/{name}"], tmp_path)
    given = load(ControllerProcess, [config], others=SECTIONS).controller
    flags = ["--model.path", str(model), "--policy.init", "random", "--launch.num-rollouts", str(given.num_rollouts)]
    derived = load_recipe([config], flags).controller
    start_s = {"start_s": derived.start_s}  # longer by the environment
    assert given.model_copy(update=start_s) == derived


def test_the_quickstart_is_that_of_the_recipes(built: dict[str, list[Manifest]], model: Path, tmp_path: Path) -> None:
    """The same run as `starling run recipes/quickstart.toml`, and the same model."""
    quickstart = load(Recipe, [ROOT / "recipes/quickstart.toml"])
    ours = load(Recipe, [config_of(built["overlays/cpu"], tmp_path)])
    for section in ("data", "sft", "rl", "sampling", "evaluation", "rollout", "reward"):
        assert getattr(ours, section) == getattr(quickstart, section), section
    assert ours.policy == quickstart.policy.model_copy(update={"init": "random"})
    files = manifests.find(built["overlays/cpu"], "ConfigMap", _model_name(built["overlays/cpu"]))["data"]
    assert set(files) == {path.name for path in model.iterdir()}
    for path in model.iterdir():
        now, then = json.loads(path.read_text()), json.loads(files[path.name])
        for one in (now, then):
            one.pop("transformers_version", None)
        assert then == now, f"{path.name} differs: make it again with `starling scratch`"


def _model_name(documents: list[Manifest]) -> str:
    return next(one["metadata"]["name"] for one in documents if one["metadata"]["name"].startswith("model-"))


def test_the_rules_are_those_of_prometheus() -> None:
    sys.path.insert(0, str(KUBERNETES / "components/monitoring"))
    import make_rules

    written = yaml.safe_load((KUBERNETES / "components/monitoring/rules.yaml").read_text())
    assert written == make_rules.prometheus_rule(), "run deploy/kubernetes/components/monitoring/make_rules.py"
