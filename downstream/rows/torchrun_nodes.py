"""Rows for torchrun: several agents on loopback instead of nodes; restarts after ranks or agents are killed."""

from __future__ import annotations

import socket
from pathlib import Path

from _launchers import TORCHRUN, is_step, launched_by, losses, ranks, script, unsharded_losses

import _job
from _processes import descendants, kill
from _rows import Rows, Run

rows = Rows("torchrun", environment="torch")

LIMIT_S = 300.0
SETTINGS = {"world": 1, "sharded": False, "timeout": LIMIT_S + 60}  # of rows whose ranks belong to a launcher
STEPS = 40
# By default, torchrun 2.13 shares one store between restarts, so ranks may read the addresses of killed ranks.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Ranks are killed between step 22 and the last step, so both implementations resume from the checkpoint of step 20.
LONG_STEPS = ["--steps", str(STEPS), "--save-every", "20", "--pause", "0.1"]


def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def agent(where: str, is_host: bool, *arguments: str) -> list[str]:
    """Return the torchrun command of one node, without the script."""
    settings = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8,is_host={int(is_host)}"
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-id=rows", f"--rdzv-endpoint={where}", f"--rdzv-conf={settings}"]
    return [*TORCHRUN, "--local-addr=127.0.0.1", *rendezvous, *arguments]


@rows("two nodes of two ranks each (c10d rendezvous), HSDP with a replica a node", **SETTINGS)
def two_nodes(run: Run) -> None:
    job = script(run, "07_launch.py", "--out", "run", "--steps", "12", "--replicas", "2")
    where = endpoint()
    with launched_by(run, LIMIT_S) as launched:
        nodes = (True, False)
        agents = [agent(where, first, "--nnodes=2", "--nproc-per-node=2") for first in nodes]
        launched.finish(*(launched.start([*each, *job], **OWN_STORE) for each in agents))
    described = ranks(run, Path("run"), 4)
    node_of = [each["node"] for each in described]
    if sorted(node_of) != [0, 0, 1, 1]:
        raise AssertionError(f"expected two ranks on each of two nodes, got nodes {node_of}")
    for rank, each in enumerate(described):
        sharing, reducing = ({node_of[other] for other in each["groups"][name]} for name in ("shard", "replicate"))
        if sharing != {node_of[rank]} or reducing != {0, 1}:
            raise AssertionError(f"rank {rank} shards over nodes {sharing} and replicates over nodes {reducing}")
    run.note("groups", [each["groups"] for each in described])
    run.note("placements", [each["placements"] for each in described])
    run.note("losses", losses(Path("run")))
    run.agrees("losses", run.noted["losses"], unsharded_losses(12))


@rows("a rank is killed, torchrun restarts all ranks from the checkpoint with the same losses", **SETTINGS)
def killed_rank(run: Run) -> None:
    with launched_by(run, LIMIT_S) as launched:
        for name, kills in (("whole", False), ("cut", True)):
            job = script(run, "07_launch.py", "--out", name, *LONG_STEPS)
            own = ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.2"]
            process = launched.start([*agent(endpoint(), True, *own), *job], **OWN_STORE)
            if kills:
                launched.wait_until(is_step(22, Path(name)), "step 22 is finished", process)
                kill(ranks(run, Path(name), 2)[1]["pid"])
            launched.finish(process)
    if len(_job.read_steps(Path("cut"))) <= STEPS:
        raise AssertionError("no step was repeated: the rank was killed too late, or not at all")
    run.note("placements", ranks(run, Path("cut"), 2)[0]["placements"])
    run.note("losses", losses(Path("cut")))
    run.agrees("losses", run.noted["losses"], losses(Path("whole")), tolerance=0)


@rows("two nodes, one is killed: the other resumes alone from the checkpoint (--nnodes 1:2)", **SETTINGS)
def lost_node(run: Run) -> None:
    job = script(run, "07_launch.py", "--out", "run", *LONG_STEPS)
    where = endpoint()
    elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2"]
    with launched_by(run, LIMIT_S) as launched:
        commands = [[*agent(where, is_host, *elastic), *job] for is_host in (True, False)]
        first, second = (launched.start(command, **OWN_STORE) for command in commands)
        launched.wait_until(is_step(22, Path("run")), "step 22 is finished", first, second)
        for pid in [*descendants(second.pid), second.pid]:
            kill(pid)
        launched.finish(first)
    steps = _job.read_steps(Path("run"))
    run.note("ranks", {f"step {step['step']}": step["ranks"] for step in steps})  # of the last repetition of each step
    if [step["ranks"] for step in steps if step["step"] in (20, 21, 40)] != [2, 2, 1, 1]:
        raise AssertionError(f"expected 20 steps on two ranks and 20 on one, got {steps}")
    run.note("placements", ranks(run, Path("run"), 1)[0]["placements"])
    run.note("losses", losses(Path("run"), tolerance=1e-4))
    run.agrees("losses", run.noted["losses"], unsharded_losses(STEPS), tolerance=1e-4)
