"""The manifests of examples/cluster: Slurm's script runs, KubeRay has the fields, commands fit."""

import os
import re
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Command, command_in
from test_docs import check_command

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "cluster" / "slurm.sbatch"
MANIFEST = ROOT / "examples" / "cluster" / "kuberay.yaml"

# Fields of KubeRay's CRDs that are used here, each with its type; "!": it must be there. From
# github.com/ray-project/kuberay, ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go (authOptions
# since v1.5.1), and of Kubernetes' PodTemplateSpec (core/v1) what is used.
MAPPING, TEXT, WHOLE, SWITCH = dict, str, int, bool
VOLUME_MOUNT = {"name!": TEXT, "mountPath!": TEXT}
CONTAINER = {
    "name!": TEXT,
    "image!": TEXT,
    "env": [{"name!": TEXT, "value": TEXT}],
    "resources": {"requests": MAPPING, "limits": MAPPING},
    "volumeMounts": [VOLUME_MOUNT],
}
VOLUME = {
    "name!": TEXT,
    "persistentVolumeClaim": {"claimName!": TEXT},
    "emptyDir": {"medium": TEXT, "sizeLimit": TEXT},
}
POD = {"metadata": MAPPING, "spec!": {"containers!": [CONTAINER], "volumes": [VOLUME]}}
CLUSTER = {
    "rayVersion": TEXT,
    "authOptions": {"mode": TEXT},
    "headGroupSpec!": {"rayStartParams!": MAPPING, "template!": POD, "serviceType": TEXT},
    "workerGroupSpecs": [
        {
            "groupName!": TEXT,
            "replicas": WHOLE,
            "minReplicas!": WHOLE,
            "maxReplicas!": WHOLE,
            "rayStartParams!": MAPPING,
            "template!": POD,
        }
    ],
}
JOB = {
    "apiVersion!": TEXT,
    "kind!": TEXT,
    "metadata!": {"name!": TEXT},
    "spec!": {
        "entrypoint": TEXT,
        "backoffLimit": WHOLE,
        "shutdownAfterJobFinishes": SWITCH,
        "ttlSecondsAfterFinished": WHOLE,
        "submissionMode": TEXT,
        "rayClusterSpec!": CLUSTER,
    },
}


def problems(value: Any, wanted: Any, *, where: str = "") -> list[str]:
    """What does not fit the fields: unknown, missing, or of another type."""
    if isinstance(wanted, list):
        if not isinstance(value, list):
            return [f"{where}: is no list"]
        return [
            problem
            for number, item in enumerate(value)
            for problem in problems(item, wanted[0], where=f"{where}[{number}]")
        ]
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            return [f"{where}: is no mapping"]
        known = {name.removesuffix("!"): inner for name, inner in wanted.items()}
        found = [f"{where}.{name}: no such field" for name in value if name not in known]
        found += [f"{where}.{name[:-1]}: missing" for name in wanted if _lacks(value, name)]
        for name in value:
            if name in known:
                found += problems(value[name], known[name], where=f"{where}.{name}")
        return found
    right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    return [] if right else [f"{where}: {value!r} is no {wanted.__name__}"]


def _lacks(value: dict[str, Any], name: str) -> bool:
    return name.endswith("!") and name[:-1] not in value


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


def test_the_job_has_the_fields_of_kuberay() -> None:
    job = documents()[0]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert problems(job, JOB) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda job: job["spec"].update(entryPoint="x"), ".spec.entryPoint: no such field"),
        (lambda job: job["spec"].update(backoffLimit="3"), ".spec.backoffLimit: '3' is no int"),
        (
            lambda job: job["spec"]["rayClusterSpec"].pop("headGroupSpec"),
            ".spec.rayClusterSpec.headGroupSpec: missing",
        ),
        (
            lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
            ".spec.rayClusterSpec.workerGroupSpecs[0].groupName: missing",
        ),
    ],
)
def test_a_wrong_field_is_found(change: Any, said: str) -> None:
    job = documents()[0]
    change(job)
    assert problems(job, JOB) == [said]


def test_the_pods_fit_together() -> None:
    """The same image and volume everywhere, as much Ray as the project pins, a token, GPUs."""
    spec = documents()[0]["spec"]["rayClusterSpec"]
    head, (worker,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    pods = [each["template"]["spec"] for each in (head, worker)]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    for pod in pods:
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        resources = pod["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
    for group in (head, worker):  # values of rayStartParams are options of a command: text
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert spec["rayVersion"] == pinned[1]
    assert f'"ray[default]=={pinned[1]}"' in (MANIFEST.parent / "Dockerfile").read_text()
    assert spec["authOptions"] == {"mode": "token"}
    gpus = worker["replicas"] * int(
        pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    asked = shlex.split(documents()[0]["spec"]["entrypoint"])
    places = [int(asked[asked.index(f"--cluster.{kind}") + 1]) for kind in ("learners", "engines")]
    assert sum(places) == gpus


def test_the_ports_are_closed_to_other_namespaces() -> None:
    policy = documents()[1]
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    own, operator = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {}}]}
    assert operator["ports"] == [{"port": 8265}]


def commands() -> list[str]:
    """Every command line of posttrain in the manifests, variables filled in."""
    script = SCRIPT.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip().removesuffix("&") for line in script.splitlines()]
    found = [line for line in lines if line.startswith("posttrain ")]
    (shown,) = re.findall(r"slurm\.sbatch (.*?)\n#\n", SCRIPT.read_text(), re.S)
    arguments = shown.replace("\\\n#", " ")
    found = [line.replace('"$@"', arguments) for line in found]
    found.append(documents()[0]["spec"]["entrypoint"])
    address = "10.0.0.1:6379"
    return [re.sub(r'"\$(address|RAY_ADDRESS)"', address, line) for line in found]


def test_the_commands_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both parse, and the recipes that they name resolve with the keys that they set."""
    posttrain: Command = command_in(tmp_path, columns=200, monkeypatch=monkeypatch, capsys=capsys)
    assert len(commands()) == 2
    for line in commands():
        check_command(line)
        words = shlex.split(line.replace("/shared/", f"{ROOT}/"))[1:]
        words = [str(ROOT / word) if word.startswith("recipes/") else word for word in words]
        found = posttrain(*[word for word in words if word != "--resume"], "--dry-run")
        assert found.code == 0, found.err
        assert "[cluster]" in found.out
        assert 'address = "10.0.0.1:6379"' in found.out


# ----------------------------------------------------------------------------- Slurm

STUBS = {
    # Runs what it is asked to run, as a step on that node would.
    "srun": """
while [[ "$1" == --* ]]; do [[ "$1" == --nodelist=* ]] && export NODE="${1#*=}"; shift; done
exec "$@"
""",
    "scontrol": 'echo "$*" >> "$LOG"; printf "%s\\n" node-a node-b node-c\n',
    "ip": """
number="$(tail -c 2 <<< "${NODE:-node-a}" | tr abc 123)"
echo "2: $6    inet 10.1.0.$number/24 brd 10.1.0.255 scope global $6"
""",
    "hostname": "echo fe80::1 10.2.0.9 10.3.0.9\n",
    "ray": """
if [[ "$1" == health-check ]]; then exit 0; fi
echo "${NODE:-here} [$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}] ray $*" >> "$LOG"
exec sleep 60
""",
    "posttrain": """
for _ in $(seq 100); do [[ "$(grep -c 'ray start' "$LOG")" == 3 ]] && break; sleep 0.1; done
echo "posttrain $* ${NCCL_SOCKET_IFNAME:-}" >> "$LOG"
trap 'echo saved >> "$LOG"; exit 7' TERM
if [[ "$1 $2" == "run long.toml" ]]; then for _ in $(seq 600); do sleep 0.1; done; fi
exit 3
""",
}


def start(
    tmp_path: Path, *arguments: str, **environment: str
) -> tuple[subprocess.Popen[bytes], Path]:
    """The script under way, with stubs for what a cluster has; and the file that they write."""
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    log.touch()
    for name, text in STUBS.items():
        path = tools / name
        path.write_text(f"#!/bin/bash\n{text.lstrip()}")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    given = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "node-[a-c]",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_GPUS_ON_NODE": "8",
        **environment,
    }
    return subprocess.Popen(["bash", str(SCRIPT), *arguments], env=given, cwd=tmp_path), log


def test_the_script_starts_a_head_workers_and_the_run(tmp_path: Path) -> None:
    process, log = start(tmp_path, "demo.toml", "--rl.steps", "3", INTERFACE="ib0")
    assert process.wait(timeout=60) == 3  # that of posttrain
    lines = log.read_text().splitlines()
    assert lines[0] == "show hostnames node-[a-c]"
    head, *others = sorted(line for line in lines if "ray start" in line)
    wanted = "--node-ip-address=10.1.0.1 --port=21234 --include-dashboard=false"
    assert head.startswith("node-a [token 64] ray start --head --block")
    assert wanted in head
    assert "--num-cpus=64 --num-gpus=8" in head
    assert [line.split()[0] for line in others] == ["node-b", "node-c"]
    for number, line in enumerate(others, start=2):
        assert "[token 64] ray start --block --address=10.1.0.1:21234" in line
        assert f"--node-ip-address=10.1.0.{number} " in line
    run = next(line for line in lines if line.startswith("posttrain"))
    assert run == (
        "posttrain run demo.toml --rl.steps 3 --resume --cluster.address 10.1.0.1:21234 ib0"
    )


def test_without_an_interface_the_first_address_of_the_name_is_taken(tmp_path: Path) -> None:
    process, log = start(tmp_path, "demo.toml")
    process.wait(timeout=60)
    assert "--cluster.address 10.2.0.9:21234" in log.read_text()


def test_before_the_time_limit_the_run_is_asked_to_save(tmp_path: Path) -> None:
    process, log = start(tmp_path, "long.toml", INTERFACE="ib0")
    while "posttrain run" not in log.read_text():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 7
    assert log.read_text().splitlines()[-1] == "saved"


def test_the_script_is_sound_bash() -> None:
    """It parses, stops at errors, and quotes its variables."""
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    code = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in code:
        plain = re.sub(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|\$\(\(.*?\)\)|\[\[.*?\]\]', "", line)
        unquoted = re.findall(r"\$[A-Za-z_{][\w}:-]*", plain.partition(" #")[0])
        assert not [name for name in unquoted if name not in ("$cpus", "$gpus", "$address")], line
    options = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)
    first_command = next(n for n, line in enumerate(text.splitlines()) if line.startswith("set "))
    last_option = max(n for n, line in enumerate(text.splitlines()) if line.startswith("#SBATCH "))
    assert last_option < first_command  # sbatch reads options up to the first command
