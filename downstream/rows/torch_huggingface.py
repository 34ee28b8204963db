"""Rows for torch.distributed.checkpoint with safetensors: sharded, full and consolidated files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _transformer import evaluate, shard, train, transformer, whole
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from _rows import Rows, Run

rows = Rows(
    "torch.distributed.checkpoint as safetensors",
    environment="torch_safetensors",
    versions=("torch", "safetensors"),
)


def trained(run: Run) -> Any:
    dist.init_process_group("gloo")
    model = shard(transformer())
    run.sharded(model)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), run.rank)
    return model


def other() -> Any:
    """Return a sharded model with other weights."""
    model = transformer()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    return shard(model)


def reads(run: Run, model: Any, folder: Path) -> None:
    """Load the files into a sharded and an unsharded model, and compare the weights."""
    loaded = other()
    state = loaded.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    loaded.load_state_dict(state)
    run.agrees("weights", whole(loaded), whole(model), 0.0)
    run.note("evaluation", evaluate(loaded, run.rank))
    plain = transformer().state_dict()
    dcp.load(plain, storage_reader=HuggingFaceStorageReader(str(folder)))
    run.agrees("unsharded weights", plain, whole(model), 0.0)


@rows("every rank writes its shards (save_distributed), in one file or several")
def distributed(run: Run) -> None:
    model = trained(run)
    names = list(model.state_dict())
    for title, mapping in (("one", None), ("several", {name: 1 + i % 2 for i, name in enumerate(names)})):
        folder = run.folder / title
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=mapping, save_distributed=True)
        dcp.save(model.state_dict(), storage_writer=writer)
        run.note(f"names {title}", sorted(path.name for path in folder.iterdir()))
    reads(run, model, run.folder / "one")
    run.files(run.folder)


@rows("shards that are consolidated into full files")
def consolidated(run: Run) -> None:
    model = trained(run)
    mapping = {name: 1 + i % 2 for i, name in enumerate(model.state_dict())}
    folder = run.folder / "saved"
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=mapping, save_distributed=True, enable_consolidation=True
    )
    dcp.save(model.state_dict(), storage_writer=writer)
    dist.barrier()
    reads(run, model, folder)
    run.files(run.folder)


@rows("rank 0 writes full states, which every rank broadcasts or reads")
def full(run: Run) -> None:
    model = trained(run)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    folder = run.folder / "saved"
    if run.rank == 0:
        dcp.save(weights, storage_writer=HuggingFaceStorageWriter(str(folder)), no_dist=True)
    dist.barrier()
    found = transformer().state_dict()
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    loaded = other()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(loaded, found if run.rank == 0 else {}, options=options)
    run.agrees("weights", whole(loaded), whole(model), 0.0)
    run.files(run.folder)
    run.weights(loaded)
