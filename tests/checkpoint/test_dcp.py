"""Import and export of torch.distributed.checkpoint (DCP) checkpoints."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _blocks import Transformer, TransformerBlock, next_token_loss, token_batch
from _engines import ENGINES
from _pool import POOL, distributed
from composable_shard import checkpoint

JOB = "checkpoint.test_dcp"


def run(seed, engine="ours", tied=True):
    """A model and its optimizer with several groups."""
    torch.manual_seed(seed)
    model = Transformer(tied=tied)
    if engine == "fsdp1":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated
            model = FullyShardedDataParallel(
                model, auto_wrap_policy=ModuleWrapPolicy({TransformerBlock}), use_orig_params=True, device_id="cpu"
            )
    else:
        for block in model.blocks:
            ENGINES[engine](block)
        ENGINES[engine](model)
    groups = [
        {"params": [p for n, p in model.named_parameters() if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01 * (1 + seed), betas=(0.8, 0.9))


def train(model, optimizer, rank, steps):
    losses = []
    for step in range(steps):
        loss = next_token_loss(model, token_batch(rank, step)[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def content(model, optimizer):
    """All tensors of a model and of its optimizer, in full."""
    there = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            there[f"{name}.{entry}"] = full(value)
    return there


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name


def dicts(model, optimizer, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))


@pytest.mark.parametrize(("engine", "flat"), [("fsdp2", False), ("fsdp2", True), ("fsdp1", False)])
@distributed(world=2)
def test_fsdp_checkpoints_load_and_training_resumes(rank, world, engine, flat, tmp_path):
    model, optimizer = run(0, engine)
    train(model, optimizer, rank, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = dicts(model, optimizer, flat)
        dcp.save({**state, "epoch": 3, "others": {"a": [1, (2.5, None)], "t": torch.arange(3)}}, checkpoint_id=tmp_path)

    ours = run(1)
    others = {"a": None, "t": torch.zeros(3, dtype=torch.int64)}
    whole = {"model": ours[0], "optimizer": ours[1], "epoch": 0, "others": others}
    imported = checkpoint.import_dcp(tmp_path, whole)
    assert (imported.missing, imported.unexpected) == ((), ())
    assert (whole["epoch"], others["a"], others["t"].tolist()) == (3, [1, (2.5, None)], [0, 1, 2])
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in ours[1].param_groups] == [
        (0.01, (0.8, 0.9), 0.1),
        (0.01, (0.8, 0.9), 0.0),
    ]
    # the same again with torch's own reader, into FSDP2
    theirs = run(2, "fsdp2")
    train(*theirs, rank, 1)
    loaded = dicts(*theirs, flat)
    dcp.load(loaded, checkpoint_id=tmp_path)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(*theirs, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options)
    assert_equal(content(*ours), content(*theirs))
    assert train(*ours, rank, 2) == train(*theirs, rank, 2)
    assert_equal(content(*ours), content(*theirs))


@distributed(world=2)
def test_fsdp2_reads_exported_checkpoints(rank, world, tmp_path):
    model, optimizer = run(0)
    train(model, optimizer, rank, 2)
    path = checkpoint.export_dcp(tmp_path / "out", {"model": model, "optimizer": optimizer, "epoch": 4})
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    theirs = run(1, "fsdp2")
    train(*theirs, rank, 1)
    loaded = {**dicts(*theirs), "epoch": 0}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(*theirs, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert loaded["epoch"] == 4
    assert_equal(content(*theirs), content(model, optimizer))
    assert train(*theirs, rank, 2) == train(model, optimizer, rank, 2)
    with pytest.raises(cs.errors.ShardConfigValueError, match="out exists"):
        checkpoint.export_dcp(path, {"model": model})
    with pytest.raises(cs.errors.ShardConfigValueError, match="optimizer updates parameters of no module"):
        checkpoint.export_dcp(tmp_path / "alone", {"optimizer": optimizer})
    with pytest.raises(cs.errors.CheckpointError, match=r"bad could not be written: rank \d: .*[Pp]ickle"):
        checkpoint.export_dcp(tmp_path / "bad", {"model": model, "x": lambda: None})
    dist.barrier()
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def large_job(rank, world, tmp_path, save):
    torch.manual_seed(save)
    with torch.device("cpu" if save else "meta"):
        model = nn.Sequential(*(nn.Linear(256, 1024, bias=False) for _ in range(4)))
    for layer in model:
        cs.fully_shard(layer)
    if save:
        dcp.save({"weights": model.state_dict()}, checkpoint_id=tmp_path)
        return {name: full(each) for name, each in model.state_dict().items()}
    read = checkpoint.import_dcp(tmp_path, {"weights": model}, verify=False).bytes_read
    return read, {name: full(each) for name, each in model.state_dict().items()}


def test_each_rank_reads_only_the_bytes_of_its_shards(tmp_path):
    saved = POOL.run(f"{JOB}:large_job", 1, {"tmp_path": tmp_path, "save": True})[0]
    for read, there in POOL.run(f"{JOB}:large_job", 2, {"tmp_path": tmp_path, "save": False}):
        assert read == 4 * 256 * 1024 * 4 // 2
        assert_equal(there, saved)


class Trap:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@distributed(world=1)
def test_no_code_in_a_checkpoint_is_executed(rank, world, tmp_path):
    trap = tmp_path / "trapped"
    saved, target = tmp_path / "saved", {"t": torch.zeros(4), "v": 0}
    dcp.save({"t": torch.ones(4), "v": Trap(trap)}, checkpoint_id=saved)
    assert not trap.exists()
    with pytest.raises(cs.errors.CheckpointUnsafeError, match="the value v is more than plain data and was not loaded"):
        checkpoint.import_dcp(saved, target)
    (saved / ".metadata").write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(cs.errors.CheckpointUnsafeError, match=r"\.metadata asks for posix.mkdir"):
        checkpoint.import_dcp(saved, target)
    assert not trap.exists()
    for module, name in (("torch", "Size.__init__"), ("builtins", "eval"), ("torch", "load"), ("os", "system")):
        (saved / ".metadata").write_bytes(b"\x80\x04\x8c%c%s\x8c%c%s\x93." % (
            len(module), module.encode(), len(name), name.encode()))  # fmt: skip
        with pytest.raises(cs.errors.CheckpointUnsafeError, match="asks for"):
            checkpoint.import_dcp(saved, target)
    for owner, name in ((Metadata, "__init__"), (torch.Size, "numel"), (_MEM_FORMAT_ENCODING, 3)):
        (saved / ".metadata").write_bytes(pickle.dumps(ByName(owner, name)))
        with pytest.raises(cs.errors.CheckpointUnsafeError, match=r"asks for builtins\.getattr of another class"):
            checkpoint.import_dcp(saved, target)
    assert (target["t"].tolist(), target["v"]) == ([0] * 4, 0)


class ByName:
    """Pickled as `getattr(owner, name)`, as early Python 3.11 (3.11.2) pickles members of enumerations."""

    def __init__(self, owner, name):
        self.about = owner, name

    def __reduce__(self):
        return getattr, self.about


def test_enumerations_may_be_pickled_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: ByName(type(self), self.name).__reduce__()
    )
    with pytest.warns(UserWarning, match="to save in a single process"):
        dcp.save({"t": torch.ones(4)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert b"getattr" in (tmp_path / "saved" / ".metadata").read_bytes()
    target = {"t": torch.zeros(4)}
    checkpoint.import_dcp(tmp_path / "saved", target)
    assert target["t"].all()


def edited(directory, edit):
    """Change `.metadata`."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _elsewhere(name):
    def edit(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    return edit


def _move(metadata):
    for info in metadata.storage_data.values():
        info.offset += 1 << 40


def _overlap(metadata):
    record = metadata.state_dict_metadata["t"]
    record.chunks = record.chunks * 2


def _larger(metadata):
    metadata.state_dict_metadata["t"].size = torch.Size([1 << 20])


def _dtype(metadata):
    metadata.state_dict_metadata["t"].properties.dtype = torch.int32


EDITS = {
    "outside": (_elsewhere("../saved/__0_0.distcp"), cs.errors.CheckpointUnsafeError, "names the file '../saved"),
    "absolute": (_elsewhere("/etc/passwd"), cs.errors.CheckpointUnsafeError, "names the file '/etc/passwd'"),
    "missing": (_elsewhere("__7_0.distcp"), cs.errors.CheckpointCorruptError, "__7_0.distcp is missing"),
    "offset": (_move, cs.errors.CheckpointCorruptError, r"has .* bytes, but at least 1,09"),
    "overlap": (_overlap, cs.errors.CheckpointCorruptError, "t: its pieces do not cover it, or overlap"),
    "gap": (_larger, cs.errors.CheckpointCorruptError, "t: its pieces do not cover it"),
    "dtype": (_dtype, cs.errors.CheckpointCorruptError, "expected tensor t of dtype torch.int32"),
}


@distributed(world=1)
def test_inconsistent_checkpoints_are_refused_and_nothing_changes(rank, world, tmp_path):
    good, saved = tmp_path / "good", tmp_path / "saved"
    dcp.save({"t": torch.arange(1000.0), "v": 3}, checkpoint_id=good)
    target = {"t": torch.zeros(1000), "v": 0}
    for edit, error, message in EDITS.values():
        shutil.copytree(good, saved)
        edited(saved, edit)
        with pytest.raises(error, match=message):
            checkpoint.import_dcp(saved, target)
        shutil.rmtree(saved)
    shutil.copytree(good, saved)
    data = bytearray((good / "__0_0.distcp").read_bytes())
    at = data.index(torch.tensor([500.0]).numpy().tobytes())
    data[at] ^= 1
    (saved / "__0_0.distcp").write_bytes(data)
    with pytest.raises(cs.errors.CheckpointCorruptError, match=r"__0_0.distcp is damaged: t, bytes"):
        checkpoint.import_dcp(saved, target)
    (saved / "__0_0.distcp").unlink()
    (saved / "__0_0.distcp").symlink_to(good / "__0_0.distcp")
    with pytest.raises(cs.errors.CheckpointUnsafeError, match="a symbolic link"):
        checkpoint.import_dcp(saved, target)
    whole = (good / ".metadata").read_bytes()
    for size in range(0, len(whole), 37):
        (saved / ".metadata").write_bytes(whole[:size])
        with pytest.raises(cs.errors.CheckpointCorruptError, match=r"\.metadata is damaged"):
            checkpoint.import_dcp(saved, target)
    (saved / ".metadata").unlink()
    with pytest.raises(cs.errors.CheckpointIncompleteError, match=r"has no \.metadata"):
        checkpoint.import_dcp(saved, target)
    with pytest.raises(cs.errors.CheckpointMismatchError, match=r"u: the checkpoint has no such entry"):
        checkpoint.import_dcp(good, {"u": 0})
    with pytest.raises(cs.errors.CheckpointMismatchError, match=r"t: has shape \(3,\) here"):
        checkpoint.import_dcp(good, {"t": torch.zeros(3), "v": 0})
    assert (target["v"], target["t"].any().item()) == (0, False)
    checkpoint.import_dcp(good, target)
    assert torch.equal(target["t"], torch.arange(1000.0))
