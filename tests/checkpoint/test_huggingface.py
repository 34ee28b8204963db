"""Hugging Face's layout: `safetensors` reads exported models, and its files fill sharded models."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _blocks import Transformer, token_batch
from _engines import ENGINES
from _pool import distributed
from composable_shard import checkpoint
from composable_shard.checkpoint._io import files

JOB = "checkpoint.test_huggingface"


def transformer(seed=0, shard=cs.fully_shard, **options):
    torch.manual_seed(seed)
    model = Transformer(tied=True, **options)
    model.register_buffer("seen", torch.arange(3) + seed)
    if shard is not None:
        for block in model.blocks:
            shard(block)
        shard(model)
    return model


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def whole(model):
    return {name: full(tensor).clone() for name, tensor in model.state_dict().items()}


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name


def read_parts(path):
    index = json.loads((path / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in dict.fromkeys(index["weight_map"].values()):
        own = load_file(path / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == own.keys()
        tensors |= own
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == size
    return tensors


@pytest.mark.parametrize("engine", ["ours", "fsdp2"])
@distributed(world=2)
def test_safetensors_reads_exported_models(rank, world, engine, tmp_path):
    model = transformer(shard=ENGINES[engine])
    expected = whole(model)
    del expected["head.weight"]  # it is tied, so it is written once
    config = {"config.json": '{"a": 1}'}
    path = checkpoint.export_safetensors(tmp_path / "one", model, extra_files=config)
    assert sorted(each.name for each in path.iterdir()) == ["config.json", "model.safetensors"]
    assert (path / "config.json").read_text() == '{"a": 1}'
    assert_equal(load_file(path / "model.safetensors"), expected)
    with safe_open(path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}

    path = checkpoint.export_safetensors(tmp_path / "parts", model, max_shard_size=4000, dtype=torch.bfloat16)
    count = len(list(path.glob("model-*-of-*.safetensors")))
    assert count > 2
    assert (path / f"model-00001-of-{count:05d}.safetensors").exists()
    halved = {name: each.bfloat16() if each.is_floating_point() else each for name, each in expected.items()}
    assert_equal(read_parts(path), halved)
    sizes = [each.stat().st_size for each in path.glob("*.safetensors")]
    assert max(sizes) < 4000 + 2000  # no tensor is larger; headers are added

    path = checkpoint.export_safetensors(
        tmp_path / "norms", model, rename=lambda name: f"x.{name}" if "norm" in name else None
    )
    norms = {f"x.{name}": each for name, each in expected.items() if "norm" in name}
    assert_equal(load_file(path / "model.safetensors"), norms)


@pytest.mark.parametrize("meta", [False, True], ids=["filled", "meta"])
@distributed(world=(1, 2))
def test_a_sharded_model_is_filled_from_safetensors_files(rank, world, meta, tmp_path):
    plain = transformer(seed=5, shard=None)
    expected = {name: each for name, each in plain.state_dict().items() if name != "embed.weight"}  # tied
    first = {name: each for name, each in expected.items() if "blocks.0" in name}
    rest = {name: each.double() for name, each in expected.items() if name not in first and each.is_floating_point()}
    rest["seen"] = expected["seen"]
    if rank == 0:
        save_file(first, tmp_path / "model-00001-of-00002.safetensors")
        save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
        named = {name: f"model-0000{1 + (name in rest)}-of-00002.safetensors" for name in expected}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    barrier()
    if meta:
        with torch.device("meta"):
            model = transformer(seed=1)
    else:
        model = transformer(seed=1)
        model.train()(token_batch(rank, 0)[0])  # even while weights are kept unsharded
    with pytest.raises(
        cs.errors.CheckpointMismatchError, match=r"\n  norm.weight: has dtype float32 here, but float64 .*cast"
    ):
        checkpoint.import_safetensors(tmp_path, model)
    imported = checkpoint.import_safetensors(tmp_path, model, cast=True)
    assert (imported.missing, imported.unexpected) == ((), ())
    assert_equal(whole(model), dict(plain.state_dict()))
    assert model.head.weight is model.embed.weight
    assert not any(each.is_meta for each in model.state_dict().values())
    model.cos, model.sin = plain.cos, plain.sin
    batch = token_batch(rank, 0)[0]
    torch.testing.assert_close(model(batch), plain(batch))


def barrier():
    torch.distributed.barrier()


@distributed(world=2)
def test_each_rank_reads_only_its_part_of_the_files(rank, world, tmp_path):
    weights = {f"{i}.weight": torch.randn(1024, 256) for i in range(4)}
    if rank == 0:
        save_file(weights, tmp_path / "model.safetensors")
    barrier()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 1024, bias=False) for _ in range(4)))
    for layer in model:
        cs.fully_shard(layer)
    read = []
    files.observe, kept = lambda operation, path: read.append((operation, path.name)), files.observe
    imported = checkpoint.import_safetensors(tmp_path, model)
    files.observe = kept
    assert imported.bytes_read == 4 * 1024 * 256 * 4 // 2
    assert read.count(("open", "model.safetensors")) == (2 if rank == 0 else 1)  # only one rank reads the header
    assert_equal(whole(model), weights)


@distributed(world=2)
def test_mismatched_files_leave_the_model_unchanged_on_every_rank(rank, world, tmp_path):
    model = transformer()
    before = whole(model)
    good = {name: each.clone() for name, each in before.items()}
    good["embed.weight"] = good.pop("head.weight")
    wrong = {
        "missing": ({n: t for n, t in good.items() if n != "norm.weight"}, "norm.weight: is not in the files"),
        "extra": ({**good, "y": torch.zeros(2)}, "y: is in the files, but not in the model"),
        "shape": ({**good, "norm.weight": torch.zeros(3)}, r"norm.weight: has shape \(16,\) here, but \(3,\)"),
        "dtype": ({**good, "seen": torch.zeros(3)}, "seen: has dtype int64 here, but float32"),
        "ties": (
            {**good, "head.weight": good["embed.weight"] + 1},
            "head.weight: is tied to embed.weight in this model",
        ),
    }
    for title, (tensors, message) in wrong.items():
        tensors = {name: each + 1 if name.startswith("blocks") else each for name, each in tensors.items()}
        if rank == 0:
            save_file(tensors, tmp_path / f"{title}.safetensors")
        barrier()
        with pytest.raises(cs.errors.CheckpointMismatchError, match=message):
            checkpoint.import_safetensors(tmp_path / f"{title}.safetensors", model, cast=True)
        assert_equal(whole(model), before)
    imported = checkpoint.import_safetensors(tmp_path / "missing.safetensors", model, strict=False)
    assert (imported.missing, imported.unexpected) == (("norm.weight",), ())
    imported = checkpoint.import_safetensors(
        tmp_path / "extra.safetensors", model, rename=lambda name: None if name == "y" else name
    )
    assert (imported.missing, imported.unexpected) == ((), ())
    assert torch.equal(whole(model)["blocks.0.attention.q.weight"], before["blocks.0.attention.q.weight"] + 1)
    if rank == 0:  # a file with both names of a tied weight, with equal values
        save_file({**good, "head.weight": good["embed.weight"].clone()}, tmp_path / "twice.safetensors")
    barrier()
    checkpoint.import_safetensors(tmp_path / "twice.safetensors", model)
    assert_equal(whole(model), before)


def header(entries, data=b"\0" * 16, length=None):
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin, end, dtype="F32", shape=(4,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


DAMAGED = {
    "short": (b"\1\0", "cannot have a header"),
    "bomb": (header(b"{}", length=1 << 60), "cannot have a header"),
    "beyond": (header({"a": entry(0, 16)}, b""), "its tensors end at byte"),
    "overlap": (header({"a": entry(0, 16), "b": entry(8, 16, shape=(2,))}), "b begins at byte"),
    "hole": (header({"a": entry(8, 16, shape=(2,))}), "a begins at byte"),
    "negative": (header({"a": entry(-16, 0)}), "-16 is not a count"),
    "huge": (header({"a": entry(0, 1 << 80)}), "is not a count"),
    "bytes": (header({"a": entry(0, 16, shape=(3,))}), "cannot have 16 bytes"),
    "boolean": (header({"a": entry(0, 16, shape=(True, 4))}), "True is not a count"),
    "twice": (header(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 16)).encode(),) * 2)), "it has the key 'a' twice"),
    "deep": (header(b"[" * 100_000), "cannot be parsed"),
    "list": (header([1]), "cannot be parsed"),
    "dtype": (header({"a": entry(0, 16, dtype="F31")}), "'F31'; supported dtypes: F64"),
    "no json": (header(b"\xff{"), "cannot be parsed"),
}


@pytest.mark.parametrize("title", DAMAGED)
def test_damaged_and_malicious_headers_are_refused(tmp_path, title):
    data, message = DAMAGED[title]
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})
    with pytest.raises(cs.errors.CheckpointCorruptError, match=message) as raised:
        checkpoint.import_safetensors(tmp_path, model)
    assert str(file) in str(raised.value)
    assert torch.equal(model["a"], torch.ones(4))


def test_indices_and_links_to_other_directories_are_refused(tmp_path):
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(2))})
    outside = tmp_path / "outside.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(2)}, outside)
    inside = tmp_path / "inside"
    inside.mkdir()
    index = inside / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(outside), "x/../../outside.safetensors", ".safetensors", "a\n.bin"):
        index.write_text(json.dumps({"weight_map": {"a": name, "b": name}}))
        with pytest.raises(cs.errors.CheckpointUnsafeError, match=r"names the file .* which is not in its directory"):
            checkpoint.import_safetensors(inside, model)
    (inside / "part.safetensors").symlink_to(outside)
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    with pytest.raises(
        cs.errors.CheckpointUnsafeError, match=r"part.safetensors is a link to .*Hugging Face's cache are"
    ):
        checkpoint.import_safetensors(inside, model)
    (inside / "part.safetensors").unlink()
    with pytest.raises(cs.errors.CheckpointCorruptError, match=r"part.safetensors is missing"):
        checkpoint.import_safetensors(inside, model)
    save_file({"a": torch.zeros(4), "b": torch.zeros(2)}, inside / "part.safetensors")
    with pytest.raises(cs.errors.CheckpointCorruptError, match="contains b, but the index does not"):
        checkpoint.import_safetensors(inside, model)
    index.write_text(json.dumps({"weight_map": dict.fromkeys("abc", "part.safetensors")}))
    with pytest.raises(cs.errors.CheckpointCorruptError, match="its index lists c, but no file contains this tensor"):
        checkpoint.import_safetensors(inside, model)
    for damaged in ("[", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        index.write_text(damaged)
        with pytest.raises(cs.errors.CheckpointCorruptError, match="is not a safetensors index"):
            checkpoint.import_safetensors(inside, model)
    index.unlink()
    (inside / "part.safetensors").rename(inside / "model-00001-of-00002.safetensors")
    with pytest.raises(cs.errors.CheckpointIncompleteError, match="it has parts of a model, but no index"):
        checkpoint.import_safetensors(inside, model)
    with pytest.raises(cs.errors.CheckpointIncompleteError, match="does not exist"):
        checkpoint.import_safetensors(tmp_path / "none", model)
    assert all(torch.equal(each, torch.ones_like(each)) for each in model.values())

    cache = tmp_path / "models--x--y"  # the layout of Hugging Face's cache: files and links to them
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "0a1b").mkdir(parents=True)
    outside.rename(cache / "blobs" / "f00")
    (cache / "snapshots" / "0a1b" / "model.safetensors").symlink_to("../../blobs/f00")
    checkpoint.import_safetensors(cache / "snapshots" / "0a1b", model)
    assert not any(each.any() for each in model.values())


class LoRALinear(nn.Linear):
    """A linear layer with an adapter whose parameters have peft's names."""

    def __init__(self, size, rank=2):
        super().__init__(size, size)
        self.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(size, rank, bias=False), "other": nn.Linear(size, rank)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, size, bias=False)})


@distributed(world=2)
def test_adapters_are_exported_and_imported_without_the_base_model(rank, world, tmp_path):
    torch.manual_seed(3)
    model = nn.Sequential(LoRALinear(8), LoRALinear(8))
    for layer in model:
        cs.fully_shard(layer)
    before = whole(model)
    path = checkpoint.export_safetensors(
        tmp_path / "lora", model, adapter="default", extra_files={"adapter_config.json": "{}"}
    )
    there = load_file(path / "adapter_model.safetensors")
    names = [f"{i}.lora_{part}" for i in range(2) for part in "AB"]
    expected = {f"base_model.model.{name}.weight": before[f"{name}.default.weight"] for name in names}
    assert_equal(there, expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    changed = whole(model)
    imported = checkpoint.import_safetensors(path, model, adapter="default")
    assert (imported.missing, imported.unexpected) == ((), ())
    assert_equal(whole(model), {name: before[name] if ".default." in name else changed[name] for name in before})
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    path = checkpoint.export_safetensors(
        tmp_path / "trained", model, rename=lambda name: name if name in trained else None
    )
    assert load_file(path / "model.safetensors").keys() == trained
    with pytest.raises(cs.errors.ShardConfigValueError, match="has no tensors to write"):
        checkpoint.export_safetensors(tmp_path / "none", model, adapter="third")


@distributed(world=2)
def test_an_export_is_complete_or_does_not_exist(rank, world, tmp_path):
    model = transformer()

    def full_disk(operation, path):
        if operation == "write" and path.name.startswith("model-00002"):
            raise OSError(28, "No space left on device")

    files.observe, kept = full_disk, files.observe
    try:
        with pytest.raises(cs.errors.CheckpointError, match="No space left on device"):
            checkpoint.export_safetensors(tmp_path / "out", model, max_shard_size=4000)
    finally:
        files.observe = kept
    barrier()
    assert list(tmp_path.iterdir()) == []
    checkpoint.export_safetensors(tmp_path / "out", model, max_shard_size=4000)
    with pytest.raises(cs.errors.ShardConfigValueError, match="out exists; pass a path"):
        checkpoint.export_safetensors(tmp_path / "out", model)
    with torch.device("meta"):
        unfilled = transformer(seed=1)
    with pytest.raises(cs.errors.CheckpointError, match="on the meta device"):
        checkpoint.export_safetensors(tmp_path / "meta", unfilled)
    for wrong in ({"dtype": torch.int8}, {"max_shard_size": 0}, {"rename": 3}, {"adapter": "a.b"},
                  {"rename": lambda _: "x"}, {"extra_files": {"../x": ""}}, {"extra_files": {"x": 3}}):  # fmt: skip
        with pytest.raises(cs.errors.ShardConfigError, match=next(iter(wrong))):
            checkpoint.export_safetensors(tmp_path / "wrong", model, **wrong)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
