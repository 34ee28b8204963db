"""The files that start training on several nodes: their settings are consistent, and their commands run."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

import _job
from _launched import descendants, finish, free_port, kill
from _pool import distributed
from composable_shard import checkpoint

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "tutorials" / "launch"
PAGE = ROOT / "docs" / "launching.md"
REAL_TORCHRUN = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run --local-addr 127.0.0.1 "$@"\n'


def taken(command):
    """Parse a torchrun command. Returns torchrun's options and the script's job; exits if one is invalid."""
    options = get_args_parser().parse_args(command)
    assert Path(options.training_script).name == "07_launch.py"
    job = importlib.import_module("07_launch").parse(options.training_script_args)
    ranks = int(options.nnodes.rpartition(":")[2]) * int(options.nproc_per_node)
    assert job.windows % ranks == 0, "the windows cannot be divided among the ranks"
    return options, job


# ------------------------------------------------------------------------------------- the training


@distributed(world=2)
def test_training_resumes_from_its_checkpoint_and_is_bitwise_identical_to_fsdp2(rank, world, tmp_path):
    def losses(name, **settings):
        job = _job.Job(out=tmp_path / name, save_every=4, **settings)
        return [step.loss for step in _job.train(job, torch.device("cpu"))]

    whole = losses("whole", steps=8)
    assert whole[-1] < whole[0]
    assert losses("fsdp2", steps=8, fsdp2=True) == whole
    assert losses("cut", steps=4) + losses("cut", steps=8) == whole
    torch.testing.assert_close(losses("replicas", steps=8, replicas=2), whole, rtol=1e-5, atol=0)
    if rank == 0:
        assert [step["step"] for step in _job.read_steps(tmp_path / "cut")] == [*range(1, 9)]
        assert checkpoint.latest(tmp_path / "cut") == 8


@distributed(world=2)
def test_a_number_of_ranks_that_does_not_divide_the_work_is_rejected(rank, world, tmp_path):
    with pytest.raises(SystemExit, match="the number of ranks, 2, must be a multiple of --replicas 3"):
        next(_job.train(_job.Job(out=tmp_path, replicas=3), torch.device("cpu")))


# ------------------------------------------------------------------------------------------- Slurm

SRUN = """#!/bin/bash
# Runs the command once for each node, on this machine.
while [[ $1 == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
    started+=($!)
done
for each in "${started[@]}"; do wait "$each" || status=$?; done
exit ${status:-0}
"""
SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames node[7-8]" ] && printf "127.0.0.1\\nnode8\\n"\n'
NOTED = '#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@" > noted-$SLURM_NODEID.txt\nexit $LEAVES_WITH\n'


def submitted(folder, torchrun, **variables):
    """Run the batch file like Slurm, with replacements for Slurm's programs. Returns exit status, output and errors."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": torchrun}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f"PATH={shlex.quote(str(programs))}:$PATH\n")
    (folder / "tutorials").symlink_to(ROOT / "tutorials")
    slurm = {
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "64",
    }
    process = subprocess.Popen(
        ["bash", folder / "tutorials" / "launch" / "slurm.sbatch", "--steps", "4"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **slurm, **variables, "PATH": f"{programs}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = finish(process, 200)
    return process.returncode, output, errors


def test_the_batch_file_starts_one_torchrun_per_node_with_the_address_of_the_first(tmp_path):
    assert submitted(tmp_path, NOTED, LEAVES_WITH="0") == (0, "", "")
    first, second = ((tmp_path / f"noted-{node}.txt").read_text().splitlines() for node in (0, 1))
    assert first == second
    threads, *command = first
    assert threads == "8"
    options, job = taken(command)
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "8", 3)
    assert (options.rdzv_backend, options.rdzv_id, options.rdzv_endpoint) == ("c10d", "123456", "127.0.0.1:23456")
    assert job == _job.Job(out=tmp_path / "runs" / "slurm", steps=4, replicas=2, windows=96)


def test_the_batch_file_returns_the_exit_status_of_its_ranks(tmp_path):
    assert submitted(tmp_path, NOTED, LEAVES_WITH="7")[0] == 7


def test_the_batch_file_requests_the_resources_that_its_commands_use():
    text = (LAUNCH / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    assert f"RANKS_PER_NODE:-{asked['gpus-per-node']}" in text
    head = re.split(r"^[^#\n]", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert text.count("#SBATCH") == head.count("#SBATCH"), "sbatch reads no option after the first command"


@pytest.mark.matrix
def test_the_batch_file_trains_on_two_simulated_nodes(tmp_path):
    code, output, errors = submitted(
        tmp_path, REAL_TORCHRUN, RANKS_PER_NODE="1", PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo"
    )
    assert code == 0, errors
    assert [step["ranks"] for step in _job.read_steps(tmp_path / "runs" / "slurm")] == [2] * 4, output


# -------------------------------------------------------------------------------------- Kubernetes


def service_and_job():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job


def torchrun_of_the_job(**variables):
    """The arguments of torchrun in a container of the Job, and its environment, with `variables` replaced."""
    (container,) = service_and_job()[1]["spec"]["template"]["spec"]["containers"]
    known = {each["name"]: each["value"] for each in container["env"]} | variables
    words = [re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], word) for word in container["args"]]
    assert container["command"] == ["torchrun"]
    return words, known


def test_the_parts_of_the_manifest_are_consistent():
    service, job = service_and_job()
    assert [(each["apiVersion"], each["kind"]) for each in (service, job)] == [("v1", "Service"), ("batch/v1", "Job")]
    spec, template = job["spec"], job["spec"]["template"]["spec"]
    (container,) = template["containers"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    assert template["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in template["volumes"]}

    options, parsed = taken(torchrun_of_the_job()[0])
    first = f"{job['metadata']['name']}-0.{template['subdomain']}"
    assert options.rdzv_endpoint == f"{first}:{service['spec']['ports'][0]['port']}"
    assert int(options.nnodes) == spec["completions"] == spec["parallelism"] == parsed.replicas
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (ROOT / options.training_script).is_file()
    assert str(parsed.out).startswith(container["volumeMounts"][0]["mountPath"] + "/")


@pytest.mark.matrix
def test_the_command_of_two_pods_trains(tmp_path):
    (tmp_path / "torchrun").write_text(REAL_TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    run = tmp_path / "run"
    changes = {"RANKS_PER_NODE": "1", "ENDPOINT": f"127.0.0.1:{free_port()}", "OUT": str(run), "OMP_NUM_THREADS": "1"}
    command, variables = torchrun_of_the_job(**changes)
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    with (tmp_path / "output.txt").open("w") as output:
        pods = [
            subprocess.Popen(
                [tmp_path / "torchrun", *command, "--steps=4"],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
            )
            for _ in range(2)
        ]
        try:
            codes = [pod.wait(200) for pod in pods]
        finally:
            for pod in pods:
                kill([*descendants(pod.pid), pod.pid])
                pod.wait()
    assert codes == [0, 0], (tmp_path / "output.txt").read_text()
    assert [step["ranks"] for step in _job.read_steps(run)] == [2] * 4


# ---------------------------------------------------------------------------------------- restarts

LEAVES_A_KEY = """
import os, sys
import torch.distributed as dist

store, rank, world = next(dist.rendezvous("env://"))
number = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("start", number, store.check(["left"]), flush=True)
store.set("left", "by " + number)
sys.exit(number == "0")
"""


def test_both_files_use_a_new_store_for_each_restart():
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in (LAUNCH / "slurm.sbatch").read_text()
    assert torchrun_of_the_job()[1]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.matrix
def test_with_a_new_store_ranks_do_not_see_keys_of_an_earlier_start(tmp_path):
    (tmp_path / "script.py").write_text(LEAVES_A_KEY)
    own = ["--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    own += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "script.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *own],
        cwd=tmp_path,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = finish(process, 120)
    assert output == "start 0 False\nstart 1 False\n", errors


# ---------------------------------------------------------------------------------------- the page


def commands_of_the_page():
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words[:1] == ["torchrun"]]


def test_every_command_of_the_page_is_valid_for_torchrun_and_the_script():
    commands = commands_of_the_page()
    assert len(commands) >= 3
    numbers = [taken(command)[0].nnodes for _, *command in commands]
    assert {"1:1", "2", "1:2"} <= set(numbers)
