"""Ctrl-C while another rank hangs ends the process as fast as under FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TIMEOUT_S = 3
RANK = """
import datetime, os, signal, sys, threading, time
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard as fsdp2
import composable_shard

rank, store, timeout = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group(
    "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
)
models = []
for shard in (fsdp2, composable_shard.fully_shard):
    group = dist.new_group(timeout=datetime.timedelta(seconds=120))
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    for layer in model:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    for _ in range(2):
        model(torch.ones(2, 512)).sum().backward()
    models.append((group, model))
dist.barrier()
if rank:
    print("silent", flush=True)
    time.sleep(600)
for group, model in models:
    group._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=timeout))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        model(torch.ones(2, 512)).sum().backward()
    except KeyboardInterrupt:
        print("took", time.monotonic() - begin, flush=True)
os._exit(0)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("transport", ["p2p", "torch"])
def test_ctrl_c_is_as_fast_as_under_fsdp2_if_a_rank_hangs(transport):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "COMPOSABLE_SHARD_TRANSPORT": transport, "PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"{folder}/store", str(TIMEOUT_S)]
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK, str(rank), *arguments], env=environment, stdout=-1, text=True)
            for rank in range(2)
        ]
        try:
            output, _ = ranks[0].communicate(timeout=200)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    theirs, ours = (float(line.split()[1]) for line in output.splitlines())
    assert ours < max(theirs, TIMEOUT_S) + 0.8 * TIMEOUT_S, (theirs, ours)
