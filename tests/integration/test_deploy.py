"""The files in deploy/: what their own tools say of them, and that the commands in them are ours."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from dsec.cli.main import cli
from dsec.cluster.credentials import make_cluster
from free_port import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "dsec"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
OWN_NATS: dict[str, Any] = {"nats": {"enabled": False, "urls": ["tls://nats.example:4222"]}}
FULL: dict[str, Any] = {
    "image": {"repository": "registry.example/dsec", "tag": "1"},
    "imagePullSecrets": [{"name": "pull"}],
    "nats": {"tlsSecret": "nats-tls", "storageClass": "fast", "replicas": 5},
    "apiserver": {"extraArgs": ["--overflow", "/etc/dsec/overflow.json"], "service": {"annotations": {"a": "b"}}},
    "edge": {
        "labels": {"disk": "nvme"},
        "tolerations": [{"operator": "Exists"}],
        "store": "s3://bucket/dsec",
        "env": [{"name": "DSEC_VM_SPARE", "value": "0"}],
    },
}


def rendered(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The chart's manifests by kind and name."""
    manifests = helm_python.Chart.load(CHART).render(values, name="sandboxes", namespace="agents")
    found = {}
    for path, text in manifests.items():
        if not path.endswith(".txt"):
            for each in yaml.safe_load_all(text):
                if each is not None:
                    found[each["kind"], each["metadata"]["name"]] = each
    return found


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (found,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(found)


def check_command(arguments: list[str]) -> None:
    """That our command line takes it. Variables stand for something of the right kind."""
    arguments = [re.sub(r"\$\(\w+\)|\$\{\w+\}", "x", argument) for argument in arguments]
    command = cli.commands[arguments[0]]
    command.make_context(arguments[0], arguments[1:])


@pytest.mark.parametrize("values", [{}, OWN_NATS, FULL], ids=["as it is", "another NATS", "all options"])
def test_the_chart_is_what_kubernetes_takes(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    manifests = rendered(values)
    for version in ("1.26", "1.34"):
        for manifest in manifests.values():
            kubernetes_validate.validate(manifest, version, strict=True)
    for key in (("DaemonSet", "dsec-edge"), ("Deployment", "dsec-apiserver")):
        check_command(container(manifests[key])["args"])


def test_what_holds_sandboxes_finds_the_same_paths_on_the_node() -> None:
    pod = rendered({})["DaemonSet", "dsec-edge"]["spec"]["template"]["spec"]
    assert pod["hostPID"], "else it can't start anything outside of the pod"
    (edge,) = pod["containers"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    mounts = {mount["name"]: mount for mount in edge["volumeMounts"]}
    for name in ("state", "run"):
        assert mounts[name]["mountPath"] == paths[name]
        assert mounts[name]["mountPropagation"] == "Bidirectional"
    assert edge["args"][edge["args"].index("--state") + 1] == paths["state"]
    assert {"name": "DSEC_RUN", "value": paths["run"]} in edge["env"]


def test_a_store_that_is_a_directory_is_the_nodes() -> None:
    pod = rendered({"edge": {"store": "/mnt/shared/dsec"}})["DaemonSet", "dsec-edge"]["spec"]["template"]["spec"]
    paths = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert (paths["store"], mounts["store"]) == ("/mnt/shared/dsec", "/mnt/shared/dsec")
    bucket = rendered(FULL)["DaemonSet", "dsec-edge"]["spec"]["template"]["spec"]
    assert "store" not in {volume["name"] for volume in bucket["volumes"]}


def test_who_joins_has_the_authority_of_the_servers_certificates() -> None:
    for key in (("DaemonSet", "dsec-edge"), ("Deployment", "dsec-apiserver")):
        pod = rendered(FULL)[key]["spec"]["template"]["spec"]
        (ca,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "ca"]
        assert ca == {"secretName": "nats-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        assert {"name": "ca", "mountPath": "/etc/dsec/ca", "readOnly": True} in container(rendered(FULL)[key])[
            "volumeMounts"
        ]
        assert "ca" not in str([each["name"] for each in rendered({})[key]["spec"]["template"]["spec"]["volumes"]])


def test_a_nats_server_is_ready_when_it_has_caught_up_and_ends_slowly(tmp_path: Path) -> None:
    """The probe and the hook of the pod, run as they are against a server with the pod's configuration."""
    pod = container(rendered({"nats": {"replicas": 1}})["StatefulSet", "dsec-nats"])
    binaries = Path(sys.executable).parent
    client, monitor = free_port(), free_port()

    def here(words: list[str]) -> list[str]:
        text = "\0".join(words).replace("/opt/dsec/bin", str(binaries)).replace("/data", str(tmp_path))
        return text.replace(":8222", f":{monitor}").split("\0")

    make_cluster(tmp_path / "users", 1)
    text = rendered({"nats": {"replicas": 1}})["ConfigMap", "dsec-nats"]["data"]["server.conf"]
    (text,) = here([text.replace("0.0.0.0:4222", f"127.0.0.1:{client}")])
    (tmp_path / "server.conf").write_text(text)
    probe = here(pod["readinessProbe"]["exec"]["command"])
    assert subprocess.run(probe, capture_output=True, check=False).returncode != 0
    log = tmp_path / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [binaries / "nats-server", "-c", tmp_path / "server.conf"], env={"POD_NAME": "n0"}, stdout=out, stderr=out
        )
    try:
        began = time.monotonic()
        while subprocess.run(probe, capture_output=True, check=False).returncode:
            assert time.monotonic() - began < 180, log.read_text()
        subprocess.run(here(pod["lifecycle"]["preStop"]["exec"]["command"]), check=True, capture_output=True)
        server.terminate()
        server.wait(180)
    finally:
        server.kill()
        server.wait()
    assert "lame duck" in log.read_text().lower()


def test_only_edges_have_privileges() -> None:
    for (kind, name), manifest in rendered(FULL).items():
        if kind in ("Deployment", "StatefulSet"):
            context = container(manifest)["securityContext"]
            assert context["runAsNonRoot"], name
            assert context["capabilities"] == {"drop": ["ALL"]}
        if kind in ("Deployment", "StatefulSet", "DaemonSet"):
            assert manifest["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nats": {"enabled": False}}, "urls"),
        ({"nats": {"replicas": 2}}, "replicas"),
        ({"edge": {"statedir": "/var/lib/dsec"}}, "statedir"),
        ({"edge": {"stateDir": "var/lib/dsec"}}, "stateDir"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], said: str) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    errors = [each["error"] for each in report["messages"] if each["severity"] > 2]
    assert re.search(said, "\n".join([*report["errors"], *map(str, errors)])), report


def test_nats_takes_the_configuration(tmp_path: Path) -> None:
    binary = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    assert binary is not None
    make_cluster(tmp_path / "users", 3)
    text = rendered({})["ConfigMap", "dsec-nats"]["data"]["server.conf"]
    (tmp_path / "server.conf").write_text(text)
    done = subprocess.run(
        [binary, "-t", "-c", tmp_path / "server.conf"],
        env={"POD_NAME": "dsec-nats-0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert text.count("nats-route://") == 3


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_is_what_systemd_takes(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words = shlex.split(line)
    if words[0] == "/opt/dsec/bin/dsec":
        check_command([word for word in words[1:] if not word.startswith("$DSEC_")] + join(words))
    made = tmp_path / unit.name
    made.write_text(text.replace(words[0], "/bin/true", 1))
    verify = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=one", str(made)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def join(words: list[str]) -> list[str]:
    """What the environment file says."""
    return ["--join", "tls://nats-0:4222"] if "$DSEC_JOIN" in words else []


@pytest.mark.parametrize("name", ["README.md", "docs/CLUSTER.md"])
def test_the_lines_by_which_one_joins_are_ours(name: str) -> None:
    text = (DEPLOY.parent / name).read_text()
    lines = re.findall(r"^    (dsec (?:apiserver|edge|cluster) [^#\n]*)", text, re.MULTILINE)
    assert {shlex.split(line)[1] for line in lines} == {"apiserver", "edge", "cluster"}
    for line in lines:
        words = shlex.split(line.partition("&&")[0])[1:]
        if words[0] == "cluster":
            words = words[1:]
            command = cli.commands["cluster"].commands[words[0]]
            command.make_context(words[0], words[1:])
        else:
            check_command(words)


@pytest.mark.parametrize("hook", sorted((DEPLOY / "overflow").iterdir()), ids=lambda path: path.name)
def test_a_hook_says_how_it_is_used(hook: Path) -> None:
    done = subprocess.run([hook, "restart", "7"], env={"DSEC_OVERFLOW": "/tmp"}, capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"usage: ")
