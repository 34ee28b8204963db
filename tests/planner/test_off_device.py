"""Offload: the planner, rehearsals and runs agree on the bytes on the device, on the host and on disk."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

import composable_shard as cs
from _pool import more
from composable_shard.cli.main import main
from composable_shard.planner import KNOWN, Layout, Shape, Strategy, advise, text
from composable_shard.planner.advise import Planner
from composable_shard.planner.off_device import Offloaded
from composable_shard.planner.precision import PRECISIONS
from composable_shard.planner.rehearsal import rehearse, rehearse_source
from composable_shard.planner.sources import source_of

# Runs a program with its optimizer state on disk, or in memory. It prints how much the resident memory has grown after
# the steps, and the bytes that a rehearsal has counted.
MEASURED = """
    import re, sys, torch, composable_shard as cs
    from composable_shard._memory.disk import trim
    from composable_shard.planner.rehearsal import rehearse

    torch.set_num_threads(1)
    folder, memory, count, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 3

    def resident():
        status = open("/proc/self/status").read()
        return sum(int(kib) << 10 for kib in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", status))

    def run(count, most=lambda: None, steps=steps + 1):
        params = [torch.nn.Parameter(torch.full((1 << 20,), 0.5)) for _ in range(count)]
        optimizer = torch.optim.AdamW(params, fused=True)
        if memory:
            cs.optim.offload_optimizer(optimizer, cs.DiskOffloadPolicy(folder, memory))
        for param in params:
            param.grad = torch.ones_like(param)
        for _ in range(steps):
            optimizer.step()
            most()

    seen = rehearse(lambda: run(count), steps=steps)
    run(1)  # loads what only a first step loads
    trim()
    before, after = resident(), []
    run(count, lambda: after.append(resident()), steps)
    print(max(after) - before, seen.peak.total, seen.offloaded.host, seen.offloaded.disk)
"""


@pytest.mark.parametrize("memory", [16 << 20, more(0)])
def test_a_rehearsal_matches_the_resident_memory_of_a_run(tmp_path, memory):
    count = 12
    command = [sys.executable, "-c", textwrap.dedent(MEASURED), str(tmp_path), str(memory), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured, peak, host, disk = map(int, done.stdout.split())
    size = count * (4 << 20)
    assert (host, disk) == ((memory, 2 * size) if memory else (0, 0))
    assert measured == pytest.approx(peak + host, abs=3 << 20)
    assert abs(peak - (2 if memory else 4) * size) < 4 << 20


def program(policy, tells=True):
    def train():
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        for module in (*model, model):
            cs.fully_shard(module, offload_policy=policy)
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if tells:
            cs.optim.offload_optimizer(optimizer)
        while True:
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def test_policies_determine_what_is_on_the_device():
    size = 64 * 64 * 4 * 4 // 2  # bytes of this rank's shards
    steps = 4 * 4  # bytes of the step counts of AdamW
    nothing, everything, state, disk = (
        rehearse(program(policy, tells), 2)
        for policy, tells in (
            (cs.OffloadPolicy(), False),
            (cs.CPUOffloadPolicy(), False),
            (cs.HostOffloadPolicy(), True),
            (cs.DiskOffloadPolicy("nowhere", 5000), True),
        )
    )
    assert (nothing.peak.parameters, nothing.peak.optimizer) == (size, 2 * size + steps)
    assert nothing.offloaded == Offloaded()
    assert (everything.peak.parameters, everything.peak.optimizer) == (0, 0)
    assert everything.offloaded == Offloaded(4 * size + steps)
    assert (state.peak.parameters, state.peak.optimizer) == (size, 0)
    assert state.offloaded == Offloaded(4 * size + steps)  # copies of shards and gradients, and optimizer state
    assert disk.offloaded == Offloaded(2 * size + 5000, 2 * size)
    assert disk.offloaded.moved == 4 * size
    assert disk.peak == everything.peak
    assert nothing.peak.total - state.peak.total == pytest.approx(2 * size + steps, rel=0.01)


MIDDLE = Shape(layers=2, width=192, heads=6, vocabulary=512, sequence=64, key_value_heads=2)
OFFLOADS = {"all": {"offload": True}, "optimizer": {"state": True}, "disk": {"offload": True, "disk": True}}


@pytest.mark.parametrize("what", ["optimizer", more("all"), "disk"])
def test_the_planner_matches_a_rehearsal(what):
    strategy = replace(Strategy("zero3", Layout(1, 4)), **OFFLOADS[what])
    source = source_of(MIDDLE)
    estimated = Planner(source, PRECISIONS["float32"], 1).estimate(strategy, replace(KNOWN["h100"], backend="fake"))
    counted = rehearse_source(source, strategy, PRECISIONS["float32"], 1)
    assert (estimated.host_bytes, estimated.disk_bytes) == (
        pytest.approx(counted.offloaded.host, rel=0.01),
        pytest.approx(counted.offloaded.disk, rel=0.01),
    )
    assert estimated.disk_moved == 2 * estimated.disk_bytes
    assert estimated.memory.peak.optimizer == counted.peak.optimizer == 0
    assert estimated.memory.peak.parameters == counted.peak.parameters
    # A rehearsal counts reduced gradients until they are copied to the host. The planner does not.
    waiting = counted.peak.gradients if strategy.offload else 0
    assert abs(estimated.memory.peak.total - (counted.peak.total - waiting)) <= 0.08 * counted.peak.total


def of(advised, name):
    return next(each for each in advised.estimates if str(each.strategy) == name)


@pytest.fixture(scope="module")
def roomy():
    """The advice for a machine on which every strategy fits."""
    return advise(MIDDLE, devices=2, precision="float32", machine=replace(KNOWN["h100"], host_memory=1 << 40))


def tight(advised, memory, host):
    """The advice for the same machine with less memory."""
    machine = replace(advised.machine, memory=memory, host_memory=host)
    return advise(MIDDLE, devices=2, precision="float32", machine=machine)


def test_advice_recommends_offload_only_if_needed_and_reports_its_cost(roomy):
    assert not roomy.recommended.strategy.offloads
    assert "offload" not in roomy.reason
    least = min(each.needed for each in roomy.estimates if not each.strategy.offloads)
    state, disk = (
        min((each for each in roomy.estimates if wanted(each.strategy)), key=lambda each: each.needed)
        for wanted in (lambda strategy: strategy.state, lambda strategy: strategy.disk)
    )
    assert disk.needed < state.needed < least
    taken = tight(roomy, least - 1, 1 << 40)
    assert taken.recommended.strategy.state
    host = f"{taken.recommended.host_bytes / 2**30:.1f} GiB"
    assert f"Without offload nothing fits. Offload needs {host} of host memory per device." in taken.reason
    lines = text.script(taken, taken.recommended)
    assert "offload_policy=cs.HostOffloadPolicy()" in lines
    assert lines.endswith("cs.optim.offload_optimizer(optimizer)\n")
    unknown = tight(roomy, least - 1, None)
    assert "which is assumed to be available (the size is unknown)." in unknown.reason
    everything = of(roomy, "zero3, offload").host_bytes
    assert disk.host_bytes == everything  # all of this small state fits into the policy's memory
    bare = tight(roomy, state.needed - 1, everything - 1)
    assert bare.recommended is None
    assert re.search("offload(?: to disk)? comes closest but needs 0.0 GiB more host memory per device", bare.reason)


def test_disk_time_follows_from_the_given_bandwidth():
    shape = Shape(layers=8, width=2048, heads=16, vocabulary=512, sequence=8)
    size = 4 * shape.parameters
    values = {"memory": int(2.2e9), "host_memory": 2 * size + (1 << 30), "disk_bandwidth": 1e9}
    advised = advise(shape, devices=1, precision="float32", machine=replace(KNOWN["h100"], **values))
    chosen = advised.recommended
    assert str(chosen.strategy) == "zero3, offload to disk"
    assert chosen.host_bytes == 2 * size + (1 << 30) < of(advised, "zero3, offload").host_bytes == 4 * size
    assert (chosen.disk_bytes, chosen.disk_moved) == (2 * size, 4 * size)
    assert chosen.disk_seconds == 4 * size / 1e9 == chosen.time.optimizer
    moved, seconds, step = f"{4 * size / 2**30:.1f} GiB", f"{chosen.disk_seconds:.3g} s", f"{chosen.time.seconds:.3g} s"
    assert f"A step reads and writes {moved}, which takes {seconds} of its {step}." in advised.reason
    assert "Without offload nothing fits." in advised.reason
    assert text.as_json(advised)["recommended"]["disk_moved"] == 4 * size


def test_the_command_reports_offloaded_bytes(capsys):
    shape = "layers=1,width=64,heads=4,vocabulary=128,sequence=64"
    options = ["--strategy", "zero3", "--precision", "float32", "--offload", "disk", "--disk", "1MB"]
    assert main(["estimate", *options, shape]) == 0
    table = capsys.readouterr().out
    size = 4 * Shape.parse(shape).parameters
    (moments,) = (line.split(None, 2)[2] for line in table.splitlines() if line.startswith("  on disk"))
    assert moments == f"{2 * size / 1e3:.1f} kB"
    assert "read and written per step" in table
    assert "time of disk access at 1.0 MB/s" in table
    assert main(["estimate", *options[:4], shape]) == 0
    assert "Offloaded" not in capsys.readouterr().out
    assert main(["estimate", *options, "--optimizer", "owned", shape]) == 2
    assert "offload to disk: cannot be planned with 'owned'" in capsys.readouterr().err
