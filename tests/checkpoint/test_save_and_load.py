"""Checkpoints load bit for bit on any number of ranks, and training resumes as if it had not been interrupted."""

from __future__ import annotations

import collections
import gc
import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES
from _extended import Scaled, precompute_scales
from _pool import POOL, distributed, simulated
from composable_shard import checkpoint
from composable_shard._plan.boxes import Box
from composable_shard.checkpoint._convert import export_safetensors
from composable_shard.checkpoint._format.boxes import Part
from composable_shard.checkpoint._format.reading import Reader
from composable_shard.checkpoint._io import digests
from composable_shard.checkpoint._io.digests import BLOCK
from composable_shard.checkpoint._pruning import open_manifest


def run(seed, engine="ours", mesh=None, **options):
    """A state with a model (tied embeddings, dropout, batch norm), its optimizer and a schedule."""
    torch.manual_seed(seed)
    model = Transformer(tied=True, dropout=0.1, **options)
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    for block in model.blocks:
        ENGINES[engine](block, mesh=mesh)
    ENGINES[engine](model, mesh=mesh)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * (1 + seed))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "random": checkpoint.RandomState(),
        "data": {"epoch": 0, "order": torch.Generator().manual_seed(seed)},
    }


def train(state, rank, steps):
    """Train and return the losses, which depend on dropout and the order of the data."""
    losses = []
    for _ in range(steps):
        at = int(torch.randint(100, (), generator=state["data"]["order"]))
        loss = next_token_loss(state["model"], token_batch(rank, at)[0])
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["schedule"].step()
        state["model"].seen += 1
        losses.append(loss.item())
    return losses


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def content(state):
    """All tensors of a model and of its optimizer, in full."""
    found = {f"model.{name}": full(tensor).clone() for name, tensor in state["model"].state_dict().items()}
    for name, parameter in state["model"].named_parameters():
        for entry, value in state["optimizer"].state.get(parameter, {}).items():
            found[f"optimizer.{name}.{entry}"] = full(value).clone()
    return found


def assert_equal(state, expected):
    there = content(state)
    assert there.keys() == expected.keys()
    for name, tensor in expected.items():
        assert there[name].dtype == tensor.dtype, name
        assert torch.equal(there[name], tensor), name


@pytest.mark.parametrize("engine", ["ours", "fsdp2"])
@distributed(world=2)
def test_training_resumes_bit_for_bit(rank, world, engine, tmp_path):
    state = run(0, engine)
    torch.manual_seed(100 + rank)  # dropout differs between ranks
    random.seed(rank)
    np.random.seed(rank)
    train(state, rank, 3)
    state["data"]["epoch"] = 5
    path = checkpoint.save(tmp_path, state, step=3)
    assert path.name == "step-00000003"
    expected, drawn = train(state, rank, 3), (random.random(), np.random.random())
    after = content(state)

    other = run(1, engine)
    train(other, rank, 1 if engine == "ours" else 0)  # load with and without optimizer state
    loaded = checkpoint.load(tmp_path, other)
    assert (loaded.step, loaded.path, loaded.missing, loaded.unexpected) == (3, path, (), ())
    assert other["data"]["epoch"] == 5
    assert other["model"].head.weight is other["model"].embed.weight
    assert train(other, rank, 3) == expected
    assert (random.random(), np.random.random()) == drawn
    assert_equal(other, after)
    with torch.no_grad():
        batch = token_batch(rank, 50)[0]
        assert torch.equal(other["model"].eval()(batch), state["model"].eval()(batch))


@distributed(world=1)
def test_a_load_discards_kept_unsharded_weights(rank, world, tmp_path):
    model = cs.fully_shard(nn.Linear(4, 3), reshard_after_forward=False)
    x = torch.randn(2, 4)
    before = model(x).detach()
    checkpoint.save(tmp_path, {"model": model}, step=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model(x)
    checkpoint.load(tmp_path, {"model": model})
    assert torch.equal(model(x), before)


def save_job(rank, world, tmp_path):
    state = run(0)
    train(state, rank, 2)
    checkpoint.save(tmp_path, state, step=2)
    torch.save(content(state), tmp_path / f"full-{rank}.pt")


def load_job(rank, world, tmp_path, how):
    mesh = None
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    state = tensor_parallel_run(world) if how == "tp" else run(1, mesh=mesh)
    loaded = checkpoint.load(tmp_path, state)
    assert_equal(state, torch.load(tmp_path / "full-0.pt"))
    again = tmp_path / f"{how}-{world}"
    data_rank = rank // 2 if how == "tp" else rank
    torch.manual_seed(data_rank)  # tensor-parallel ranks must draw the same; new ranks have other seeds
    train(state, data_rank, 1)
    checkpoint.save(again, state, step=3)
    torch.save(content(state), again / f"full-{rank}.pt")
    return loaded.bytes_read


def tensor_parallel_run(world):
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Transformer(tied=True, dropout=0.1)
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block.feed_forward, mesh["tp"], plan)
        cs.fully_shard(block, mesh=mesh["dp"])
    cs.fully_shard(model, mesh=mesh["dp"])
    assert any(p.device_mesh.ndim == 2 for p in model.parameters())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5),
        "random": checkpoint.RandomState(),
        "data": {"epoch": 0, "order": torch.Generator()},
    }


JOB = "checkpoint.test_save_and_load"


@pytest.mark.parametrize(("how", "world"), [("fsdp", 1), ("fsdp", 3), ("hsdp", 4), ("tp", 4)])
def test_checkpoints_load_on_other_ranks_and_meshes_and_back(tmp_path, how, world):
    POOL.run(f"{JOB}:save_job", 2, {"tmp_path": tmp_path})
    POOL.run(f"{JOB}:load_job", world, {"tmp_path": tmp_path, "how": how})
    again = tmp_path / f"{how}-{world}"
    POOL.run(f"{JOB}:load_job", 2, {"tmp_path": again, "how": "fsdp"})


@pytest.mark.parametrize("rows", [7, 13, 3])
@simulated(world=6)
def test_shards_of_tensor_parallel_weights_that_no_axis_divides_load_elsewhere(rank, world, tmp_path, rows):
    """Three data-parallel ranks: torch computes other offsets for them than the shards have."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(5, rows), nn.Linear(rows, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(float(param.numel())).view_as(param))
    wanted = {name: param.clone() for name, param in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in model:
        cs.fully_shard(layer, mesh=mesh["dp"])
    kept = [param.to_local().clone() for param in model.parameters()]
    path = checkpoint.save(tmp_path / "saved", {"model": model}, step=0)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    checkpoint.load(path, {"model": model})
    assert all(torch.equal(*pair) for pair in zip(kept, (p.to_local() for p in model.parameters()), strict=True))
    if rank == 0:
        export_safetensors(path, tmp_path / "whole")
        with safe_open(tmp_path / "whole/model.safetensors", "pt") as file:
            assert all(torch.equal(file.get_tensor(name), value) for name, value in wanted.items())


def large_job(rank, world, tmp_path, save):
    torch.manual_seed(rank + 10 * save)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))  # 4 MiB each
    for layer in model:
        cs.fully_shard(layer)
    if save:
        return checkpoint.save(tmp_path, {"model": model}, step=0) and 0
    before = [p.full_tensor() for p in model.parameters()]
    read = checkpoint.load(tmp_path, {"model": model}).bytes_read
    assert not any(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    return read


def test_each_rank_reads_only_the_bytes_that_it_needs(tmp_path):
    POOL.run(f"{JOB}:large_job", 2, {"tmp_path": tmp_path, "save": True})
    whole = 4 << 22
    for world in (2, 4):
        need = whole // world
        for read in POOL.run(f"{JOB}:large_job", world, {"tmp_path": tmp_path, "save": False}):
            # needed bytes, and at most one more block at each end of a range for verification
            assert 2 * need <= read <= 2 * need + 4 * 2 * BLOCK


@distributed(world=2)
def test_other_libraries_read_the_files(rank, world, tmp_path):
    state = run(0)
    path = checkpoint.save(tmp_path, state, step=0)
    plain = {f"model.{name}": torch.zeros_like(full(p)) for name, p in state["model"].named_parameters()}
    dcp_load(plain, storage_reader=HuggingFaceStorageReader(str(path)))
    for name, parameter in state["model"].named_parameters():
        assert torch.equal(plain[f"model.{name}"], full(parameter)), name
    with safe_open(path / f"rank-{rank:05d}.safetensors", "pt") as file:
        local = state["model"].blocks[0].attention.q.weight.to_local()
        assert torch.equal(file.get_tensor("model.blocks.0.attention.q.weight"), local)


VALUES = {
    "numbers": [1, -(2**70), 0.1, -0.0, 1e-320, math.inf, math.nan, 3 + 4j, True, None, "ü\n"],
    "containers": [(1, (2,)), {3, 1}, frozenset({2}), {1: "a", (2, 3): [4]}, {"$": "x"}, collections.Counter({30: 2})],
    "bytes": b"\x00\xff",
    "numpy": [np.float32(0.1), np.arange(6, dtype=np.int16).reshape(2, 3), np.float64(0.3), np.complex128(1 + 2j)],
    "torch": [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")],
}


@distributed(world=2)
def test_subclasses_that_wrap_their_values_are_saved_as_plain_tensors(rank, world, tmp_path):
    """As torchao's float8 weights do."""

    def make(seed, shard):
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
        for layer in model:
            layer.weight = nn.Parameter(Scaled(layer.weight.detach()))
            shard(layer)
        shard(model)
        return model

    saved, loaded = make(1, cs.fully_shard), make(2, cs.fully_shard)
    precompute_scales(saved), precompute_scales(loaded)
    checkpoint.save(tmp_path, {"model": saved}, step=1)
    loaded(torch.ones(2, 6)).sum().backward()
    with pytest.warns(UserWarning, match=r"weight: a load changes the values of this Scaled, but not its scale"):
        checkpoint.load(tmp_path, {"model": loaded})
    for mine, theirs in zip(saved.parameters(), loaded.parameters(), strict=True):
        one, two = mine.to_local(), theirs.to_local()
        assert type(one) is type(two)
        assert torch.equal(one.inner, two.inner) if isinstance(one, Scaled) else torch.equal(one, two)
    plain = make(3, lambda module: module)
    for layer in plain:
        layer.weight = nn.Parameter(layer.weight.detach().inner)
    checkpoint.load(tmp_path, {"model": plain})
    assert torch.equal(plain[0].weight.chunk(2)[rank], saved[0].weight.to_local().inner)


def test_plain_values_are_restored_exactly(tmp_path):
    tensors = [torch.tensor(0.5), torch.randn(3).to(torch.float8_e4m3fn), torch.randn(2).to(torch.complex128)]
    tensors += [torch.zeros(0, 3), torch.tensor([True]), torch.randn(4, 3).T, torch.randn(2, dtype=torch.bfloat16)]
    checkpoint.save(tmp_path, {"values": VALUES, "history": tensors}, step=1)
    state = {"values": {}, "history": [torch.empty_like(each) for each in tensors]}
    checkpoint.load(tmp_path, state)
    assert repr(state["values"]) == repr(VALUES)
    for one, two in zip(state["history"], tensors, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


def test_subclasses_of_plain_types_are_saved_or_refused(tmp_path):
    pair = collections.namedtuple("pair", "one two")  # to load it, its class would have to be imported
    for refused in (pair(1, 2), type("mine", (tuple,), {})((1,)), collections.defaultdict(list)):
        with pytest.raises(cs.errors.ShardConfigTypeError, match=r"value is a .*checkpoints store no pickled objects"):
            checkpoint.save(tmp_path, {"value": refused}, step=1)
    checkpoint.save(tmp_path, {"value": [np.bytes_(b"ab"), collections.OrderedDict(b=1, a=2)]}, step=1)
    state = {"value": None}
    checkpoint.load(tmp_path, state)
    assert state["value"] == [b"ab", {"b": 1, "a": 2}]


def test_two_modules_with_the_same_path_are_refused(tmp_path):
    checkpoint.save(tmp_path, {"a.b": torch.nn.Linear(2, 2)}, step=1)
    state = {"a": {"b": torch.nn.Linear(2, 2)}, "a.b": torch.nn.Linear(2, 2)}
    for use in (lambda: checkpoint.load(tmp_path, state), lambda: checkpoint.save(tmp_path, state, step=2)):
        with pytest.raises(cs.errors.ShardConfigValueError, match=r"two entries are called a\.b"):
            use()


@distributed(world=2)
def test_values_that_differ_between_ranks_need_per_rank(rank, world, tmp_path):
    for differs in (rank, torch.tensor([rank]), torch.Generator().manual_seed(rank), [torch.tensor(rank), 1]):
        with pytest.raises(
            cs.errors.CheckpointMismatchError, match=r"here[.0]* .*on rank 0 and .*on rank 1; make it equal .*or wrap"
        ):
            checkpoint.save(tmp_path, {"here": differs}, step=0)
    checkpoint.save(tmp_path, {"here": checkpoint.PerRank({"rank": rank, "t": torch.tensor([rank])})}, step=0)
    given = checkpoint.PerRank(None)
    checkpoint.load(tmp_path, {"here": given})
    assert given.value == {"rank": rank, "t": torch.tensor([rank])}


def per_rank_job(rank, world, tmp_path):
    with pytest.raises(cs.errors.CheckpointMismatchError, match=r"here: has values of 2 ranks, but there are 3 now"):
        checkpoint.load(tmp_path, {"here": checkpoint.PerRank(None)})
    given = checkpoint.PerRank(None, resize=lambda saved, rank, world: (sum(saved), rank, world))
    generators = checkpoint.RandomState()
    checkpoint.load(tmp_path, {"here": given, "random": generators})
    assert given.value == (3, rank, world)
    drawn = [None] * world
    dist.all_gather_object(drawn, (torch.rand(()).item(), random.random(), np.random.random()))
    for by_kind in zip(*drawn, strict=True):
        assert len(set(by_kind)) == world


def save_per_rank_job(rank, world, tmp_path):
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    state = {"here": checkpoint.PerRank(rank + 1), "random": checkpoint.RandomState()}
    checkpoint.save(tmp_path, state, step=0)


def test_per_rank_values_are_resized_for_another_number_of_ranks(tmp_path):
    POOL.run(f"{JOB}:save_per_rank_job", 2, {"tmp_path": tmp_path})
    POOL.run(f"{JOB}:per_rank_job", 3, {"tmp_path": tmp_path})


@distributed(world=2)
def test_a_checkpoint_materializes_a_model_on_meta(rank, world, tmp_path):
    state = run(0)
    checkpoint.save(tmp_path, {"model": state["model"]}, step=0)
    with torch.device("meta"):
        model = Transformer(tied=True, dropout=0.1)
        model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    for block in model.blocks:
        cs.fully_shard(block)
    cs.fully_shard(model)
    checkpoint.load(tmp_path, {"model": model})
    for (name, one), two in zip(model.named_parameters(), state["model"].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor()), name
    assert model.head.weight is model.embed.weight
    model.eval()
    model.cos, model.sin = state["model"].cos, state["model"].sin  # they are not persistent, so no checkpoint has them
    batch = token_batch(rank, 0)[0]
    assert torch.equal(model(batch), state["model"].eval()(batch))
    assert model.seen.device.type == "cpu"


@distributed(world=1)
def test_wrappers_do_not_change_names(rank, world, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    compiled = torch.compile(model, backend="eager")
    checkpoint.save(tmp_path, {"model": compiled}, step=0)
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    replicated = nn.parallel.DistributedDataParallel(other)
    checkpoint.load(tmp_path, {"model": replicated})
    for one, two in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)


@distributed(world=1)
def test_optimizer_state_keeps_its_dtype(rank, world, tmp_path):
    model = cs.fully_shard(nn.Linear(4, 3).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    fresh = torch.optim.AdamW(model.parameters())
    checkpoint.load(tmp_path, {"model": model, "optimizer": fresh})
    for one, two in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert one["exp_avg"].dtype == torch.float32
        assert torch.equal(one["exp_avg"].full_tensor(), two["exp_avg"].full_tensor())


def test_the_latest_is_the_default_and_old_checkpoints_are_pruned(tmp_path):
    value = {"x": 0}
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (1, 2, 3, 10):
        value["x"] = step
        checkpoint.save(tmp_path, value, step=step)
    assert checkpoint.latest(tmp_path) == 10
    assert checkpoint.load(tmp_path, value, step=2).step == 2
    assert value == {"x": 2}
    assert checkpoint.load(tmp_path / "step-00000003", value).step == 3
    assert value == {"x": 3}
    with pytest.raises(cs.errors.ShardConfigValueError, match="already has a checkpoint of step 3"):
        checkpoint.save(tmp_path, value, step=3)
    value["x"] = 33
    checkpoint.save(tmp_path, value, step=3, overwrite=True)  # resumed earlier: 10 is obsolete
    assert checkpoint.latest(tmp_path) == 3
    value["x"] = 11
    checkpoint.save(tmp_path, value, step=10)
    assert checkpoint.load(tmp_path, value).step == 10
    assert value == {"x": 11}
    (tmp_path / ".step-00000011.tmp-0a").mkdir()
    removed = checkpoint.prune(tmp_path, keep=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["LATEST", "step-00000003-1", "step-00000010-1"]
    assert len(removed) == 5
    checkpoint.save(tmp_path, value, step=12, keep=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["LATEST", "step-00000012"]


@pytest.mark.parametrize("algorithm", ["xxh3", "crc32"])
def test_every_checksum_detects_a_changed_bit(tmp_path, monkeypatch, algorithm):
    monkeypatch.setattr(digests, "best", lambda: algorithm)
    tensor = torch.arange(2**19, dtype=torch.float32)  # two blocks and a header
    path = checkpoint.save(tmp_path, {"t": tensor}, step=0)
    assert checkpoint.verify(tmp_path).files == 1
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    with pytest.raises(
        cs.errors.CheckpointCorruptError, match=r"rank-00000.safetensors is damaged in bytes 2,097,152 to .*: t"
    ):
        checkpoint.verify(tmp_path)
    there = torch.zeros_like(tensor)
    with pytest.raises(cs.errors.CheckpointCorruptError, match="is damaged"):
        checkpoint.load(tmp_path, {"t": there})
    assert not there.any()


def stages(rank, world, same):
    """One pipeline stage per rank. With `same`, both have the same name."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(rank)
    stage = cs.fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    return {"stage": stage} if same else {"stage": nn.ModuleDict({str(rank): stage})}


@distributed(world=2)
def test_pipeline_stages_need_different_names(rank, world, tmp_path):
    with pytest.raises(cs.errors.CheckpointMismatchError, match=r"stage\.\w+ is a piece .* use different names"):
        checkpoint.save(tmp_path, stages(rank, world, same=True), step=0)
    plain = nn.Linear(2, 2)
    nn.init.constant_(plain.weight, rank)
    with pytest.raises(cs.errors.CheckpointMismatchError, match=r"stage\.weight is a tensor .* use different names"):
        checkpoint.save(tmp_path, {"stage": plain}, step=0)
    assert checkpoint.latest(tmp_path) is None
    state = {**stages(rank, world, same=False), "shared": torch.arange(3.0)}
    if rank:
        state["stage"]["1"].register_buffer("more", torch.ones(2))
    checkpoint.save(tmp_path, state, step=0)
    expected = {name: full(value).clone() for name, value in state["stage"].state_dict().items()}
    torch.manual_seed(9)
    for parameter in state["stage"].parameters():
        nn.init.normal_(parameter)
    checkpoint.load(tmp_path, state)
    assert all(torch.equal(full(value), expected[name]) for name, value in state["stage"].state_dict().items())


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.empty(2, dtype=torch.bits8), r"x has dtype bits8"),
        (TwoTensor(torch.zeros(2), torch.ones(2)), r"x is a TwoTensor"),
        (np.zeros(200, np.int64), r"the manifest would have [\d,]+ bytes"),
    ],
    ids=["dtype", "subclass", "array"],
)
@pytest.mark.parametrize("save", [checkpoint.save, lambda *args, **kw: checkpoint.async_save(*args, **kw).result()])
def test_values_that_could_not_be_loaded_are_not_saved(tmp_path, monkeypatch, value, what, save):
    checkpoint.save(tmp_path, {"x": 1}, step=0)
    monkeypatch.setattr("composable_shard.checkpoint._format.run.MOST_BYTES", 1000)
    with pytest.raises((cs.errors.ShardConfigValueError, cs.errors.CheckpointError), match=what):
        save(tmp_path, {"x": value}, step=1, keep=1)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000000"]


def test_an_error_after_the_commit_reports_the_commit(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"x": 1}, step=0)

    def refuse(operation, path):
        if operation == "remove":
            raise PermissionError(13, "not permitted", str(path))

    monkeypatch.setattr("composable_shard.checkpoint._io.files.observe", refuse)
    with pytest.raises(cs.errors.CheckpointError, match="step 1 is committed, but old checkpoints were not deleted"):
        checkpoint.save(tmp_path, {"x": 2}, step=1, keep=1)
    assert checkpoint.latest(tmp_path) == 1


def test_a_slice_of_columns_reads_few_extra_bytes(tmp_path):
    wide = torch.arange(4 * 2**19, dtype=torch.float32).view(4, 2**19)  # rows of 2 MiB
    checkpoint.save(tmp_path, {"wide": wide}, step=0)
    found, manifest = open_manifest(tmp_path)
    part = torch.zeros(4, 2**16)
    reader = Reader(found.path, manifest)
    reader.want_part("wide", Part(Box((0, 2**17), (4, 2**16)), part))
    reader.check(True)
    reader.copy()
    assert torch.equal(part, wide[:, 2**17 : 2**17 + 2**16])
    assert reader.bytes_copied == part.nbytes
    assert reader.bytes_checked <= 4 * 2 * BLOCK


def test_tensors_begin_at_multiples_of_64_bytes_if_possible(tmp_path):
    state = {f"{kind}.{i}": torch.ones(shape) for i in range(4) for kind, shape in (("step", ()), ("moment", (3, 16)))}
    checkpoint.save(tmp_path, {**state, "double": torch.ones(3, dtype=torch.float64)}, step=0)
    _, manifest = open_manifest(tmp_path)
    begins = {key: tensor.pieces[0].begin for key, tensor in manifest.tensors.items()}
    assert [begins[f"moment.{i}"] % 64 for i in range(4)] == [0, 0, 0, 0]
    assert begins["double"] % 8 == 0
    assert max(begins, key=begins.__getitem__).startswith("step")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_load_restores_the_garbage_collection_setting(tmp_path, enabled):
    checkpoint.save(tmp_path, {"x": 1}, step=0)
    (gc.enable if enabled else gc.disable)()
    try:
        checkpoint.load(tmp_path, {"x": 0})
        assert gc.isenabled() == enabled
        with pytest.raises(cs.errors.CheckpointMismatchError):
            checkpoint.load(tmp_path, {"y": 0})
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
