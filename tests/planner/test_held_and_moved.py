"""The formulas in docs/parallelism.md for bytes held and sent by each strategy, against counted bytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import composable_shard as cs
from composable_shard import MixedPrecisionPolicy, testing
from composable_shard._plan.layout import SLOT_ALIGNMENT_BYTES

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
NODES, PER_NODE = 2, 4
LAYERS, WIDTH = 3, 64
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def table():
    """By strategy, the formulas of the table: held, sent between nodes, sent within a node."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]
    found = {}
    for name, *cells in rows:
        if len(cells) == 3 and all(re.fullmatch(r"\s*`[^`]*[PW0][^`]*`\s*", cell) for cell in cells):
            found[re.sub(r"[`\" ]", "", name)] = [cell.strip().strip("`") for cell in cells]
    return found


def value(formula, **letters):
    """The value of a formula such as ``16P/W + cP(S-1)/S``."""
    python = re.sub(r"(?<=[\w)])\s*(?=[A-Za-z(])", "*", formula)
    return eval(python, {}, {"R": NODES, "S": PER_NODE, "W": NODES * PER_NODE, "c": 2, "g": 4, **letters})


def sharded(strategy):
    """Layers that divide evenly, one group each; none in the root, which would keep its own unsharded."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    plan = {"ddp": "ddp", "zero1": "zero1", "zero3": "zero3", "few": "zero3"}.get(strategy, strategy)
    options = {"reshard_after_forward": PER_NODE} if strategy == "few" else {}
    mesh = None
    if strategy in ("hsdp", "hfsdp"):
        mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("outer", "inner"))
    cs.shard_by_class(model, {nn.Linear}, strategy=plan, mesh=mesh, mp_policy=HALF, **options)
    return model


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_bytes(model, optimizer, resident):
    """Bytes of parameters, gradients, optimizer state and copies, and of weights that stay between uses."""
    params = list(model.parameters())
    state = [value for kept in optimizer.state.values() for value in kept.values() if value.ndim]
    tensors = [*params, *(param.grad for param in params), *state]
    return sum(local(each).nbytes for each in tensors) + cs.stats(model).get("copies/bytes", 0) + resident


def counted(strategy):
    with testing.fabric(
        NODES * PER_NODE,
        latency_s=1e-6,
        bandwidth_Bps=300e9,
        ranks_per_node=PER_NODE,
        inter_latency_s=1e-5,
        inter_bandwidth_Bps=25e9,
        clock="virtual",
    ) as net:
        model = sharded(strategy)
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params)
        pool = None
        for _ in range(3):
            net.reset()
            loss = model(torch.ones(2, WIDTH)).float().square().mean()
            pool = model._shard_state.bound.engine.pool
            between = pool.live_bytes
            loss.backward()
            resident = between if strategy == "few" else pool.live_bytes
            optimizer.step()
            held = held_bytes(model, optimizer, resident)
            optimizer.zero_grad()
        sent = {"intra": 0.0, "inter": 0.0}
        for event in net.events:
            times = 2 if event.kind == "all_reduce" else 1
            sent[event.link] += times * event.nbytes * (event.ranks - 1) / event.ranks
        marks = sum(16 * event.ranks * (event.kind != "all_gather") for event in net.events)
    return held, sent, marks


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "hsdp", "hfsdp", "few", "zero3"])
def test_the_table_of_held_and_sent_bytes_is_exact(strategy):
    formulas = table()
    assert set(formulas) == {"ddp", "zero1", "hsdp", "hfsdp", "few", "zero3"}
    held, sent, marks = counted(strategy)
    elements = LAYERS * WIDTH * WIDTH
    expected = [value(formula, P=elements) for formula in formulas[strategy]]
    slack = LAYERS * SLOT_ALIGNMENT_BYTES if strategy in ("ddp", "zero1", "few") else 0  # weights in slots of the pool
    assert expected[0] <= held <= expected[0] + slack
    for link, formula in (("inter", expected[1]), ("intra", expected[2])):
        assert formula <= sent[link] <= formula + 2 * marks, (link, sent[link], formula)


def test_the_state_of_one_rank_is_one_part_of_all():
    """Of 16 bytes per parameter, each rank holds 1/(R*S); HSDP holds 1/S."""
    elements = LAYERS * WIDTH * WIDTH
    copies = 2 * elements / PER_NODE
    assert counted("hfsdp")[0] - copies == 16 * elements / (NODES * PER_NODE)
    assert counted("hsdp")[0] == 16 * elements / PER_NODE
