"""The files for Slurm and Kubernetes: what they call exists, and the script does what it says.

There is no cluster here: `srun` and `holdfast run` are stood in for, the agent is real.
"""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from capabilities import SHUTDOWN_TIMEOUT
from holdfast.base.sizes import parse_size
from holdfast.launch.command import RESTARTS, parser

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"

CLI = "from holdfast.cli.main import main; main()"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
HOLDFAST = f"""#!/bin/bash
if [[ $1 == run ]]; then exec launcher "$@"; fi
exec {sys.executable} -c '{CLI}' "$@"
"""
LAUNCHER = """#!/bin/bash
until test -S "$HOLDFAST_MEMORY_DIR/agent.sock"; do sleep 0.05; done
holdfast agent status --json >> agents
echo "$@" >> runs
"""
TWO_ARE_LOST = "echo 3 > nodes\n"
THIRD_TIME = TWO_ARE_LOST + "(( $(wc -l < runs) >= 3 ))\n"
NEVER = "exit 7\n"
UNTIL_TERM = "trap 'exit 143' TERM\nwhile true; do sleep 0.05; done\n"


class Allocation:
    """What the script finds on a node of Slurm."""

    def __init__(self, place: Path, launcher: str) -> None:
        self.place = place
        self.number = f"{os.getpid()}{place.stat().st_ino}"
        self.memory = Path(f"/dev/shm/holdfast-{self.number}")
        (place / "bin").mkdir()
        for name, text in (
            ("srun", SRUN),
            ("launcher", LAUNCHER + launcher),
            ("holdfast", HOLDFAST),
            ("scontrol", "#!/bin/bash\necho node0\n"),
            ("squeue", "#!/bin/bash\ncat nodes\n"),
            ("hostname", "#!/bin/bash\necho 127.0.0.1\n"),
        ):
            path = place / "bin" / name
            path.write_text(text)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        (place / "nodes").write_text("5\n")

    def start(self) -> subprocess.Popen[str]:
        env = os.environ | {
            "PATH": f"{self.place}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": self.number,
            "SLURM_NNODES": "5", "SLURM_JOB_NODELIST": "node0",
        }  # fmt: skip
        self.script = subprocess.Popen(
            ["bash", str(DEPLOY / "slurm.sh"), "train.py"], env=env, cwd=self.place,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        return self.script

    @property
    def runs(self) -> list[str]:
        path = self.place / "runs"
        return path.read_text().splitlines() if path.exists() else []

    def agents(self) -> set[str]:
        return set(re.findall(r'"pid": (\d+)', (self.place / "agents").read_text()))


@pytest.fixture
def allocation(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Allocation]:
    one = Allocation(tmp_path, request.param)
    yield one
    with suppress(ProcessLookupError):  # where the script did not end as it should
        os.killpg(one.script.pid, signal.SIGKILL)
    one.script.communicate()
    shutil.rmtree(one.memory, ignore_errors=True)


@pytest.mark.soak_except("the third attempt goes through")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("allocation", "num_runs", "status"),
    [(THIRD_TIME, 3, 0), (NEVER, 5, 7)],
    indirect=["allocation"],
    ids=["the third attempt goes through", "all attempts fail"],
)
def test_the_slurm_script_keeps_the_agent_and_restarts_the_launchers(
    allocation: Allocation, num_runs: int, status: int
) -> None:
    """The same agent is there all the time and gone at the end, and the job ends as the launchers did.  One
    node stands by, one may be lost, of those that there are."""
    script = allocation.start()
    errors = script.communicate(timeout=120)[1]
    assert script.returncode == status, errors
    assert len(allocation.runs) == num_runs
    assert all(run.endswith("train.py") for run in allocation.runs)
    sizes = [re.findall(r"--nnodes=(\S+)", run) for run in allocation.runs]
    later = ["1:2"] if status == 0 else ["3:4"]
    assert sizes == [["3:4"], *[later] * (num_runs - 1)]
    (pid,) = allocation.agents()
    assert not Path(f"/proc/{pid}").exists()
    assert not list(allocation.memory.glob("jobs/*"))
    assert errors.count("what is in memory is still there") == num_runs - (status == 0)


@pytest.mark.slow
@pytest.mark.parametrize("allocation", [UNTIL_TERM], indirect=True, ids=["SIGTERM"])
def test_the_slurm_script_does_not_restart_what_slurm_stops(allocation: Allocation) -> None:
    """SIGTERM to the script, as `--signal=B:TERM` has it: the training gets it, the agent does not."""
    script = allocation.start()
    until = time.monotonic() + 120
    while not allocation.runs:
        assert time.monotonic() < until and script.poll() is None
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    errors = script.communicate(timeout=120)[1]
    assert script.returncode == 143, errors
    assert len(allocation.runs) == 1
    (pid,) = allocation.agents()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("allocation", [UNTIL_TERM], indirect=True, ids=["scancel"])
def test_the_slurm_script_frees_the_memory_when_its_steps_are_stopped(
    allocation: Allocation,
) -> None:
    """SIGTERM to the steps and not to the script, as `scancel` has it, and SIGKILL to the rest."""
    script = allocation.start()
    until = time.monotonic() + 120
    while not allocation.runs:
        assert time.monotonic() < until and script.poll() is None
        time.sleep(0.05)
    (agent,) = allocation.agents()
    parent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in {int(agent), parent} - {script.pid}:
        os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{agent}").exists() or allocation.memory.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


# -- Kubernetes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """What the file describes, by kind."""
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert [(o["kind"], o["apiVersion"]) for o in found] == [("Service", "v1"), ("Job", "batch/v1")]
    return {o["kind"]: o for o in found}


@pytest.fixture(scope="module")
def pod(objects: dict[str, Any]) -> dict[str, Any]:
    return objects["Job"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def agent(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["initContainers"]
    return found


@pytest.fixture(scope="module")
def training(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return found


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def test_pods_find_the_first_one_by_its_name(
    objects: dict[str, Any], pod: dict[str, Any], training: dict[str, Any]
) -> None:
    """A headless Service gives names to the pods of an indexed Job: JOB-0.SERVICE."""
    service, job = objects["Service"], objects["Job"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    name, labels = service["metadata"]["name"], job["spec"]["template"]["metadata"]["labels"]
    assert pod["subdomain"] == name
    assert service["spec"]["selector"].items() <= labels.items() and service["spec"]["selector"]
    assert job["spec"]["completionMode"] == "Indexed"
    told = dict(x[2:].split("=", 1) for x in training["command"] if x.startswith("--"))
    assert told["rdzv-endpoint"].split(":")[0] == f"{job['metadata']['name']}-0.{name}"
    least, most = map(int, told["nnodes"].split(":"))
    assert least < most < job["spec"]["completions"] == job["spec"]["parallelism"]  # one stands by


@pytest.mark.parametrize("file", ["kubernetes.yaml", "slurm.sh"])
def test_the_launcher_takes_its_options(file: str) -> None:
    text = (DEPLOY / file).read_text()
    if file == "slurm.sh":
        SHUTDOWN_TIMEOUT.require()
        command = re.search(r"holdfast (run (?:.*\\\n)*.*?) \\\n *\"\$@\"", text)
        assert command is not None
        words = re.sub(r"\$\w+", "1", command[1].replace("\\\n", " ").replace('"', "")).split()
    else:
        objects = {o["kind"]: o for o in yaml.safe_load_all(text)}
        (training,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
        words = training["command"][1:-1]
    assert words[0] == "run"
    given = parser().parse_args([*words[1:], "train.py"])
    assert (given.spares, given.rdzv_backend, given.max_restarts) == (1, "c10d", RESTARTS)
    assert given.training_script == "train.py" and given.rdzv_endpoint.endswith(":29400")


def test_the_agent_outlives_the_training_in_its_pod(
    pod: dict[str, Any], agent: dict[str, Any]
) -> None:
    """A sidecar (an init container that is always restarted); the training is restarted beside it."""
    assert agent["restartPolicy"] == "Always"
    assert pod["restartPolicy"] == "OnFailure"


def test_agent_and_training_share_memory_processes_and_user(
    pod: dict[str, Any], agent: dict[str, Any], training: dict[str, Any]
) -> None:
    (memory,) = pod["volumes"]
    assert memory["emptyDir"]["medium"] == "Memory" and pod["shareProcessNamespace"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] > 0
    for container in (agent, training):
        assert "securityContext" not in container
        (mount,) = container["volumeMounts"]
        place = environment(container)["HOLDFAST_MEMORY_DIR"]
        assert mount["name"] == memory["name"] and place.startswith(mount["mountPath"] + "/")
        assert environment(container)["HOLDFAST_HOST"] == {
            "fieldRef": {"fieldPath": "status.podIP"}
        }
    assert len({environment(c)["HOLDFAST_MEMORY_DIR"] for c in (agent, training)}) == 1


def test_what_the_agent_gives_out_fits(pod: dict[str, Any], agent: dict[str, Any]) -> None:
    """Into the volume, and into the limit of the container that writes to it."""
    command = agent["command"]
    budget = parse_size("budget", command[command.index("--budget") + 1])
    for limit in (
        pod["volumes"][0]["emptyDir"]["sizeLimit"],
        agent["resources"]["limits"]["memory"],
    ):
        assert budget < parse_size("limit", limit + "B")


def test_the_agent_is_started_by_a_command_that_exists(agent: dict[str, Any]) -> None:
    words = agent["command"]
    assert words[:3] == ["holdfast", "agent", "run"]
    shown = subprocess.run(
        [sys.executable, "-c", CLI, "agent", "--help"], capture_output=True, text=True
    )
    for word in words[3:]:
        assert not word.startswith("--") or word in shown.stdout
