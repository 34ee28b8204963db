"""Mixed precision: the dtypes of gathered parameters, reductions, inputs, outputs and gradients."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from contract._ways import REAL, common_fsdp, contract

BF16 = torch.bfloat16


def mlps(count=3, dim=8):
    return nn.Sequential(*(common_fsdp().MLP(dim, torch.device("cpu"), dim_multiplier=2) for _ in range(count)))


class Records(nn.Module):
    """A linear layer that notes the dtypes that it sees."""

    def __init__(self, seen, name, dim=8):
        super().__init__()
        self.seen, self.name = [seen], name
        self.layer = nn.Linear(dim, dim)

    def forward(self, x):
        self.seen[0][self.name] = (x.dtype, self.layer.weight.dtype)
        return self.layer(x)


@contract()
@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_are_gathered_in_param_dtype_and_gradients_have_the_stored_dtype(t, reshard):
    plain, model = t.pair(mlps)
    low = copy.deepcopy(plain).to(BF16)
    t.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16), reshard_after_forward=reshard)
    for step in range(2):
        x = t.randn(2, 8, step=step)
        out, expected = model(x), low(x.to(BF16))
        assert out.dtype == BF16
        t.same(out, expected)
        out.sum().backward()
        expected.sum().backward()
        for param, reference in zip(model.parameters(), low.parameters(), strict=True):
            assert param.dtype == torch.float32
            assert param.grad.dtype == torch.float32
            reduced = reference.grad.clone()
            dist.all_reduce(reduced)
            t.same(param.grad, (reduced / t.world).float(), atol=1e-2, rtol=2e-2)
        model.zero_grad()
        low.zero_grad()


@contract(ways=REAL)
def test_a_wider_reduce_dtype_adds_gradients_in_that_dtype(t):
    plain, model = t.pair(mlps)
    low = copy.deepcopy(plain).to(BF16)
    t.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    x = t.randn(2, 8)
    model(x).sum().backward()
    low(x.to(BF16)).sum().backward()
    for param, reference in zip(model.parameters(), low.parameters(), strict=True):
        reduced = reference.grad.float()
        dist.all_reduce(reduced)
        t.same(param.grad, reduced / t.world)


@contract(ways=REAL)
def test_a_narrower_reduce_dtype_rounds_gradients_first(t):
    plain, model = t.pair(mlps)
    t.shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    x = t.randn(2, 8)
    for each in (plain, model):
        each(x).sum().backward()
    for param, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad.dtype == torch.float32
        reduced = reference.grad.to(BF16)
        dist.all_reduce(reduced)
        t.same(param.grad, (reduced / t.world).float(), atol=1e-2, rtol=2e-2)


@contract(ways=REAL)
def test_microbatches_accumulate_in_the_reduce_dtype(t):
    plain, model = t.pair(mlps)
    low = copy.deepcopy(plain).to(BF16)
    t.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    sums = [torch.zeros_like(p) for p in plain.parameters()]
    for micro in range(4):
        model.set_requires_gradient_sync(micro == 3)
        x = t.randn(2, 8, step=micro)
        model(x).sum().backward()
        low.zero_grad()
        low(x.to(BF16)).sum().backward()
        for total, reference in zip(sums, low.parameters(), strict=True):
            total += reference.grad.float()
    for param, total in zip(model.parameters(), sums, strict=True):
        dist.all_reduce(total)
        t.same(param.grad, total / t.world)


@contract(transport="torch")
def test_collectives_use_the_dtypes_of_the_policy(t):
    model = t.shard(t.build(mlps), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    seen = []
    helpers = common_fsdp()
    original = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    note = functools.partial(
        helpers.reduce_scatter_with_assert, None, original, lambda output: seen.append(output.dtype)
    )
    with helpers.patch_reduce_scatter(note):
        model(t.randn(2, 8)).sum().backward()
    assert set(seen) <= {torch.float32}
    assert len(seen) >= 3 or t.way == "threads"  # threads patch the same function


@contract()
def test_outputs_are_cast_to_output_dtype(t):
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32)
    model = t.shard(t.build(mlps), mp_policy=policy)
    out = model(t.randn(2, 8))
    assert out.dtype == torch.float32
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@contract()
def test_floating_point_inputs_are_cast_in_nested_structures(t):
    seen = {}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, pair, *, more):
            seen.update(x=x.dtype, first=pair[0].dtype, tokens=pair[1].dtype, more=more["y"].dtype, words=more["w"])
            return self.layer(x)

    model = t.fully_shard(Model(), mesh=t.mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    x = t.randn(2, 8)
    model(x, (x, torch.ones(2, dtype=torch.long)), more={"y": x, "w": "words"}).sum().backward()
    assert seen == {"x": BF16, "first": BF16, "tokens": torch.long, "more": BF16, "words": "words"}


@contract()
def test_inputs_in_a_dataclass_are_cast(t):
    seen = {}

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        words: str

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, batch):
            seen["x"] = batch.x.dtype
            return Batch(self.layer(batch.x), batch.words)

    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32)
    model = t.fully_shard(Model(), mesh=t.mesh(), mp_policy=policy)
    out = model(Batch(t.randn(2, 8), "words"))
    assert seen["x"] == BF16
    assert (out.x.dtype, out.words) == (torch.float32, "words")
    out.x.sum().backward()
    assert isinstance(model.layer.weight, DTensor)
    assert model.layer.weight.grad.dtype == torch.float32


@contract()
def test_inputs_are_not_cast_without_cast_forward_inputs(t):
    seen = {}
    model = nn.Sequential(Records(seen, "first"))
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    t.fully_shard(model, mesh=t.mesh(), mp_policy=policy)
    model(t.randn(2, 8).to(BF16)).sum().backward()
    assert seen == {"first": (BF16, BF16)}
    with pytest.raises(RuntimeError, match="dtype"):
        model(t.randn(2, 8))


@contract()
def test_each_module_follows_its_own_policy(t):
    seen = {}
    model = nn.Sequential(*(Records(seen, name) for name in "abc"))
    t.fully_shard(model[1], mesh=t.mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    t.fully_shard(model[2], mesh=t.mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    t.fully_shard(model, mesh=t.mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model(t.randn(2, 8)).sum().backward()
    assert seen == {
        "a": (BF16, BF16),
        "b": (torch.float16, torch.float16),
        "c": (torch.float32, torch.float32),
    }
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@contract()
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_norms_keep_running_statistics_in_their_dtype(t, dtype):
    def make():
        return nn.Sequential(nn.Conv1d(1, 5, 3), nn.BatchNorm1d(5), nn.Conv1d(5, 4, 3))

    model = t.build(make)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    t.fully_shard(model[1], mesh=t.mesh(), mp_policy=MixedPrecisionPolicy(torch.float32, output_dtype=dtype))
    for layer in (model[0], model[2], model):
        t.fully_shard(layer, mesh=t.mesh(), mp_policy=policy)
    out = model(t.randn(3, 1, 9))
    assert out.dtype == dtype
    out.sum().backward()
    assert model[1].running_mean.dtype == torch.float32
    assert model[1].running_mean.any()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@contract()
def test_buffers_are_not_cast(t):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x):
            assert self.scale.dtype == torch.float32
            return self.layer(x) * self.scale

    model = t.fully_shard(Model(), mesh=t.mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert model(t.randn(2, 8)).dtype == torch.float32


@contract()
def test_parameters_stored_in_half_precision_train(t):
    plain, model = t.pair(lambda: mlps().to(BF16))
    t.shard(model, mp_policy=MixedPrecisionPolicy())
    x = t.randn(2, 8).to(BF16)
    for each in (plain, model):
        each(x).sum().backward()
    t.average_grads(plain)
    for param, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad.dtype == BF16
        t.same(param.grad, reference.grad, atol=1e-2, rtol=2e-2)


@contract(ways=REAL)
def test_sums_in_half_precision_do_not_overflow(t):
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    t.fully_shard(model, mesh=t.mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    (model(torch.ones(1, 2)) * 40000.0).sum().backward()
    t.same(model.weight.grad, torch.full((2, 2), 40000.0), rtol=1e-3, atol=0)


@contract()
def test_changing_the_dtype_of_a_sharded_model_and_then_loading_it(t):
    plain, model = t.pair(mlps)
    t.shard(model, mp_policy=MixedPrecisionPolicy())
    model.to(BF16)
    plain.to(BF16)
    assert all(p.dtype == BF16 for p in model.parameters())
    x = t.randn(2, 8).to(BF16)
    t.same(model(x), plain(x))
