"""Different arguments on two ranks of an export or import raise on both ranks immediately, and nothing is written."""

from __future__ import annotations

import functools
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _pool import distributed
from composable_shard import checkpoint

LIMIT_S = 30.0
AT_ONCE_S = 10.0


def trained(rank):
    """A sharded model and its optimizer, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for layer in model:
        cs.fully_shard(layer)
    cs.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4) * (rank + 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def differing(option, *values):
    """Pass different values of an option on two ranks."""
    return lambda rank: {option: values[rank]}


def swapped(name):
    return {"0.weight": "1.weight", "1.weight": "0.weight"}.get(name, name)


EXPORTS = {
    "dtype": (differing("dtype", None, torch.bfloat16), "dtype: rank 0 calls export_safetensors with None and rank 1"),
    "size": (differing("max_shard_size", 64, 10**6), "max_shard_size: rank 0 calls export_safetensors with 64"),
    "names": (
        differing("rename", None, swapped),
        r"writes 0\.weight of shape \(6, 4\).* writes 1\.weight of shape \(6",
    ),
    "fewer": (
        differing("rename", None, {"0.bias": "0.bias"}.get),
        r"rank 0 writes 0\.weight .* where rank 1 writes 0\.bias of shape \(6,\)",
    ),
    "adapter": (differing("adapter", None, "default"), "rank 1: model: has no tensors to write"),
    "no name": (differing("rename", None, 3), "rank 1: rename: is a int"),
}


@pytest.mark.parametrize("case", EXPORTS)
@distributed(world=2, limit_s=LIMIT_S)
def test_safetensors_exports_with_different_arguments_raise_on_both_ranks(rank, world, case, tmp_path):
    model, _ = trained(rank)
    options, message = EXPORTS[case]
    kinds = (cs.errors.CheckpointMismatchError, cs.errors.ShardConfigError)
    both_raise(kinds, message, lambda: checkpoint.export_safetensors(tmp_path / "out", model, **options(rank)))
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    checkpoint.export_safetensors(tmp_path / "out", model)


@distributed(world=2, limit_s=LIMIT_S)
def test_exports_and_imports_of_different_paths_raise_on_both_ranks(rank, world, tmp_path):
    model, optimizer = trained(rank)
    state = {"model": model, "optimizer": optimizer}
    own = tmp_path / str(rank)
    calls = {
        "export_safetensors": lambda path: checkpoint.export_safetensors(path, model),
        "import_safetensors": lambda path: checkpoint.import_safetensors(path, model),
        "export_dcp": lambda path: checkpoint.export_dcp(path, state),
        "import_dcp": lambda path: checkpoint.import_dcp(path, state),
    }
    for name, call in calls.items():
        if name.startswith("export"):  # each rank may import from its own copy
            message = rf"path: rank 0 calls {name} with '.*/0' and rank 1"
            both_raise(cs.errors.CheckpointMismatchError, message, functools.partial(call, own))
        message = "rank 1: path: None is a NoneType; pass a path or a URL"
        both_raise(cs.errors.ShardConfigTypeError, message, functools.partial(call, None if rank else own))
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@distributed(world=2, limit_s=LIMIT_S)
def test_imports_with_different_arguments_raise_on_both_ranks(rank, world, tmp_path):
    model, optimizer = trained(rank)
    weights = checkpoint.export_safetensors(tmp_path / "weights", model)
    both_raise(cs.errors.CheckpointMismatchError, "cast: rank 0 calls import_safetensors with False", lambda: (
        checkpoint.import_safetensors(weights, model, cast=bool(rank))))  # fmt: skip
    both_raise(cs.errors.ShardConfigTypeError, "rank 1: rename: is a int", lambda: (
        checkpoint.import_safetensors(weights, model, rename=3 if rank else None)))  # fmt: skip
    state = {"model": model, "optimizer": optimizer}
    saved = checkpoint.export_dcp(tmp_path / "dcp", state)
    message = "strict: rank 0 calls import_dcp with True and rank 1 with False"
    both_raise(cs.errors.CheckpointMismatchError, message, lambda: (
        checkpoint.import_dcp(saved, state, strict=not rank)))  # fmt: skip
    checkpoint.import_safetensors(weights, model)
    checkpoint.import_dcp(saved, state)


@distributed(world=2, limit_s=LIMIT_S)
def test_dcp_exports_of_different_states_raise_on_both_ranks(rank, world, tmp_path):
    """Otherwise the checkpoint would lack one rank's part of an optimizer and could not be loaded."""
    model, optimizer = trained(rank)
    state = {"model": model} if rank else {"model": model, "optimizer": optimizer}
    message = "state: rank 0 exports 'optimizer', but rank 1, which holds a part of it, does not"
    both_raise(cs.errors.CheckpointMismatchError, message, (
        lambda: checkpoint.export_dcp(tmp_path / "out", state)))  # fmt: skip
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@distributed(world=2, limit_s=LIMIT_S)
def test_ranks_may_import_different_copies_and_export_to_one_directory_by_two_names(rank, world, tmp_path, monkeypatch):
    model, optimizer = trained(rank)
    state = {"model": model, "optimizer": optimizer}
    monkeypatch.chdir(tmp_path)
    made = checkpoint.export_safetensors(Path("weights") if rank else tmp_path / "weights", model)
    saved = checkpoint.export_dcp(Path("dcp") if rank else tmp_path / "dcp", state)
    dist.barrier()
    own = tmp_path / str(rank)
    shutil.copytree(made, own / "weights")
    shutil.copytree(saved, own / "dcp")
    before = [param.full_tensor() for param in model.parameters()]
    for load in (
        lambda: checkpoint.import_safetensors(own / "weights", model),
        lambda: checkpoint.import_dcp(own / "dcp", state),
    ):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load()
        assert all(torch.equal(param.full_tensor(), was) for param, was in zip(model.parameters(), before, strict=True))


@distributed(world=2, limit_s=LIMIT_S)
def test_pipeline_stages_are_exported_to_dcp_under_separate_names(rank, world, tmp_path):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))["shard"]
    stage = nn.Linear(3, 3)
    cs.fully_shard(stage, mesh=mesh)
    saved = checkpoint.export_dcp(tmp_path / "out", {f"stage{rank}": stage})
    before = stage.weight.full_tensor()
    with torch.no_grad():
        stage.weight.zero_()
    checkpoint.import_dcp(saved, {f"stage{rank}": stage})
    assert torch.equal(stage.weight.full_tensor(), before)


@distributed(world=2, limit_s=LIMIT_S)
def test_dcp_keeps_entries_of_one_rank_only(rank, world, tmp_path):
    """DCP users save the state of data loaders in this way."""
    model, _ = trained(rank)
    path = checkpoint.export_dcp(tmp_path / "out", {"model": model, f"loader_{rank}": rank + 10})
    loaded = {"model": model, f"loader_{rank}": 0}
    imported = checkpoint.import_dcp(path, loaded)
    assert (imported.missing, imported.unexpected) == ((), ())
    assert loaded[f"loader_{rank}"] == rank + 10


def both_raise(kind, message, call):
    begin = time.monotonic()
    with pytest.raises(kind, match=message) as caught:
        call()
    assert time.monotonic() - begin < AT_ONCE_S
    texts = [None, None]
    dist.all_gather_object(texts, str(caught.value))
    assert texts[0] == texts[1]
