"""Sharding combined with other types of parallelism: training, clipping, optimizers, state dicts and checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _compiling import graphs_of, three_steps
from _compositions import COMPOSITIONS, LongText, Text, parallelize, shard_text, token_loss, whole
from _engines import fully_shard, named_mesh
from _pool import distributed
from _stepping import assert_at_rest
from composable_shard import HSDPMeshInfo, ShardPlacementResult, make_plan, testing

MAX_NORM = 0.3


def make_optimizer(model):
    """AdamW with the fused kernel for every other parameter, and foreach functions for the rest."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "fused": True, "foreach": False}, {"params": params[1::2], "foreach": True}]
    return torch.optim.AdamW(groups, lr=0.05, eps=1e-3)  # large eps, because some gradients are only rounding errors


def assert_close(model, want, of, when):
    for name, value in want.items():
        got = whole(of(model.get_parameter(name)))
        torch.testing.assert_close(got, value, msg=lambda m, n=name: f"{n} {when}: {m}")


def same_bits(model, other):
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), other.get_parameter(name).to_local()), name


FIRST = ("a mesh of all kinds", "experts")
MORE = [pytest.param(name, marks=pytest.mark.matrix) for name in COMPOSITIONS if name not in FIRST]


@pytest.mark.parametrize("name", [*FIRST, *MORE])
@distributed(world=4)
def test_training_is_exact_and_resumes_from_a_checkpoint(rank, world, name, tmp_path):
    composition = COMPOSITIONS[name]
    plain, model = composition.pair(fully_shard)
    optimizers = [make_optimizer(each) for each in (plain, model)]

    def train(model, optimizer, step):
        composition.loss(model, composition.part, step)
        cs.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        want = composition.mean_gradients(plain, step)
        composition.loss(model, composition.part, step)
        assert_close(model, want, lambda p: p.grad, f"gradient of step {step}")
        for key, p in plain.named_parameters():
            p.grad = want[key]
        norm = cs.clip_grad_norm_(model.parameters(), MAX_NORM)
        torch.testing.assert_close(whole(norm), nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, dict(plain.named_parameters()), lambda p: p, "after three steps")
    assert_at_rest(model)

    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers[1]), strict=True))
    assert all(isinstance(value, DTensor) for key, value in state["model"].items() if "preference" not in key)
    dcp.save(state, checkpoint_id=tmp_path)
    _, other = composition.pair(fully_shard, seed=4)
    optimizer = make_optimizer(other)
    empty = dict(zip(("model", "optimizer"), get_state_dict(other, optimizer), strict=True))
    dcp.load(empty, checkpoint_id=tmp_path)
    set_state_dict(other, optimizer, model_state_dict=empty["model"], optim_state_dict=empty["optimizer"])
    same_bits(other, model)
    for each, its in ((model, optimizers[1]), (other, optimizer)):
        train(each, its, 3)
    same_bits(other, model)
    other.load_state_dict(plain.state_dict())  # a state dict of full tensors
    assert_close(other, dict(plain.named_parameters()), lambda p: p, "after a load")


@distributed(world=4)
def test_microbatches_of_replicas_with_tensor_parallelism_are_all_reduced_once(rank, world):
    composition = COMPOSITIONS["replicas of tensor parallel"]
    plain, model = composition.pair(fully_shard)
    want = [composition.mean_gradients(plain, step) for step in range(3)]
    for step in range(3):
        model.set_requires_gradient_sync(step > 0)
        model.set_requires_all_reduce(step == 2)
        composition.loss(model, composition.part, step)
        assert all(p.grad is None or not p.grad.to_local().any() for p in model.parameters()) is (step < 2)
    assert_close(model, {key: sum(each[key] for each in want) for key in want[0]}, lambda p: p.grad, "of all")


# ---- in compiled graphs


def compiled(rank, world, name):
    composition = COMPOSITIONS[name]

    def shard(model, engine):
        composition.shard(model, engine, composition.mesh)

    def inputs(rank, step):
        generator = torch.Generator().manual_seed(10 * step + composition.part)
        return (torch.randint(0, 12, (3, 6), generator=generator),)

    def loss_of(model, step):
        return whole(model(*inputs(rank, step))).square().mean()

    return three_steps(rank, Text(layers=1), shard, inputs, loss_of=loss_of)


@pytest.mark.matrix
def test_tensor_and_sequence_parallelism_compile_into_one_graph():
    assert_expected_inline(
        graphs_of(compiled, world=4, name="tensor parallel"),
        """\
forward GwGRwwGwmmmmRwGwmmRwGwm, saves 5728 bytes
backward GmmRwGwwmmmmRwGwmmmmmmmmRwAwAwAwAwRGwAwAwwRw
""",
    )


@pytest.mark.matrix
def test_hsdp_with_tensor_parallelism_compiles_into_one_graph():
    assert_expected_inline(
        graphs_of(compiled, world=4, name="replicas of tensor parallel"),
        """\
forward RwGwmmmmRwGwmmRwGwm, saves 5728 bytes
backward mmRwGwmmmmRwGwmmmmmmmmRwAwAwAwAwAGwAwAwAww
""",
    )


# ---- long sequences


@pytest.mark.matrix
def test_a_step_of_32768_tokens_can_be_planned_and_traced_with_fake_tensors():
    """Checkpointed layers with sequence parallelism, with the sizes of a 7B model but only two layers."""
    with testing.fake(8, mesh={"dp": 4, "tp": 2}) as world, FakeTensorMode():
        model = LongText(vocabulary=32000, dim=4096, hidden=16384, layers=2)
        shard_text(parallelize(model, world.mesh["tp"]), fully_shard, mesh=world.mesh["dp"])
        plan = make_plan(model)
        seen = []
        model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
        tokens = torch.zeros(1, 32768, dtype=torch.long)

        def step():
            token_loss(model, tokens, tokens)

        assert testing.trace(model, step).count("again") == 2
        text = testing.trace(model, step)
        assert testing.assert_peak_bytes(model) == plan.peak_bytes
        assert all(p.grad.to_local().shape == p.to_local().shape for p in model.parameters())
        assert set(seen) == {(1, 16384, 4096)}, "each rank has half of the sequence"
    assert_expected_inline(
        f"{plan}\n{text}",
        """\
plan: 3 groups, 332,464,128 parameters, shard over 4
group      parameters       shard   unsharded  dtype    reshard         transport
(root)    131,080,192  125.01 MiB  500.03 MiB  float32  after backward  direct
layers.0  100,691,968   96.03 MiB  384.11 MiB  float32  after forward   direct
layers.1  100,691,968   96.03 MiB  384.11 MiB  float32  after forward   direct
peak of unsharded parameters and communication in a training step: 1268.25 MiB
UNSHARD (root)
WAIT (root)
UNSHARD layers.0
COMPUTE (root)
WAIT layers.0
UNSHARD layers.1
COMPUTE layers.0
RESHARD layers.0
WAIT layers.1
COMPUTE layers.1
RESHARD layers.1
UNSHARD layers.1
COMPUTE (root) backward
WAIT layers.1
UNSHARD layers.0
COMPUTE layers.1 backward
COMPUTE layers.1 again
RESHARD layers.1
REDUCE layers.1
WAIT layers.0
COMPUTE layers.0 backward
COMPUTE layers.0 again
RESHARD layers.0
REDUCE layers.0
RESHARD (root)
REDUCED layers.1
REDUCE (root)
REDUCED layers.0
REDUCED (root)""",
    )


# ---- meshes that cannot be combined


@distributed(world=4)
def test_errors_about_meshes_name_the_parameter_and_the_mesh(rank, world):
    mesh = named_mesh((2, 2), ("dp", "tp"))
    flat, foreign = named_mesh((4,), ("all",)), named_mesh((2, 2), ("other", "more"))
    overlapping = named_mesh((2, 2), ("tp", "rest"))
    cuda = DeviceMesh("cuda", [0, 1, 2, 3], mesh_dim_names=("gpu",), _init_backend=False)
    unnamed, some = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [0, 1], mesh_dim_names=("some",))

    def refuses(words, mesh, model=None, kind=ValueError, **options):
        model = parallelize(Text(layers=1), named_mesh((2, 2), ("dp", "tp"))["tp"]) if model is None else model
        before = [*map(id, model.parameters())]
        with pytest.raises(kind, match=words):
            fully_shard(model, mesh=mesh, **options)
        assert before == [*map(id, model.parameters())]

    where = r"parameter embed.weight: is a DTensor on .*\(tp=2\).*"
    refuses(where + r"cannot be combined with .*\(all=4\).*submeshes of one mesh", flat)
    refuses(where + r"cannot be combined with .*\(more=2\).*submeshes of one mesh", foreign["more"])
    refuses(where + r"cannot be sharded on .*\(dp=2, tp=2\).*need names, all different", mesh)
    refuses(where + r"cannot be sharded on .*\(tp=2, rest=2\).*need names, all different", overlapping)
    where = r"parameter embed.weight of Text: mesh: "
    refuses(where + r".*\(gpu=4\).* is of device type cuda, which this process does not have", cuda)
    refuses(where + r"Please init the 2D mesh .*mesh_dim_names.*DeviceMesh\(\(2, 2\)", unnamed)
    if rank > 1:
        refuses(where + rf"rank {rank} is not part of DeviceMesh\(\(some=2\)", some)

    def on(info):
        return {"model": Text(layers=1), "shard_placement_fn": lambda p: ShardPlacementResult(None, info)}

    odd = HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1)
    refuses("parameter embed.weight: mesh_info: expected an FSDPMeshInfo of a 1D mesh", mesh["dp"], **on(odd))
    refuses("parameter embed.weight: mesh_info: expected FSDPMeshInfo", mesh["dp"], kind=TypeError, **on(mesh))
