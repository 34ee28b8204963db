"""Mixed precision: bitwise identical to FSDP2, and the dtypes in which modules compute.

The reference is FSDP2, because the unsharded model has no such policy.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy

from _engines import ENGINES, fully_shard
from _models import Stack, TiedText, shard_blocks, tokens
from _parity import Case, check_parity
from _pool import distributed
from composable_shard import make_plan

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = {
    "params": {"param_dtype": BF16},  # reduced in bfloat16, from torch 2.15 on in float32
    "params-reduce-alike": {"param_dtype": BF16, "reduce_dtype": BF16},
    "params-reduce": {"param_dtype": BF16, "reduce_dtype": FP32},
    "reduce-only": {"reduce_dtype": BF16},
    "root-output": {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32},
    "root-output-only": {"output_dtype": BF16},
}


def shard_with(policy, model, engine, **options):
    """Shard every group with the policy, but use its output dtype only at the root: blocks return the compute dtype."""
    inner = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
    for block in model.blocks:
        engine(block, mp_policy=inner, **options)
    engine(model, mp_policy=policy, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=(1, 2))
def test_mixed_precision_is_bitwise_identical_to_fsdp2(rank, world, policy, reshard):
    policy = MixedPrecisionPolicy(**POLICIES[policy])
    shard = functools.partial(shard_with, policy, reshard_after_forward=reshard)
    check_parity(Case(model=Stack, shard=shard, reference=False, optimizer="adamw"), rank, world)


ROUNDED = [(None, BF16), (BF16, torch.float16)] if torch.__version__ < "2.15" else []  # see docs/migration.md


@pytest.mark.parametrize(("param", "reduce"), [(BF16, FP32), *ROUNDED], ids=str)
@distributed(world=2)
def test_accumulated_gradients_are_kept_in_the_reduce_dtype(rank, world, param, reduce):
    def train(run):
        run.set_sync(False)
        run.backward(run.loss(0))
        run.backward(run.loss(1))
        run.set_sync(True)
        loss = run.loss(2)
        run.backward(loss)
        return loss

    shard = functools.partial(shard_blocks, mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
    check_parity(Case(model=Stack, shard=shard, train=train, reference=False), rank, world)


@distributed(world=2)
def test_integer_inputs_are_not_cast(rank, world):
    shard = functools.partial(shard_blocks, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
    check_parity(Case(model=TiedText, batch=tokens, shard=shard, reference=False), rank, world)


class Spy(nn.Module):
    """Records the dtypes in its forward."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.seen = {}

    def forward(self, x, *, extra=None, count=None):
        self.seen = {
            "x": x.dtype,
            "weight": self.lin.weight.dtype,
            "buffer": self.scale.dtype,
            "nested": extra["inner"][0].dtype,
            "count": count.dtype,
        }
        return {"out": self.lin(x.to(self.lin.weight.dtype)) * self.scale.to(self.lin.weight.dtype), "count": count}


def run_spy(**options):
    model = Spy()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**options))
    out = model(torch.randn(2, 4), extra={"inner": [torch.ones(2)]}, count=torch.arange(3))
    return model, out


@distributed(world=2)
def test_forward_sees_cast_arguments_and_parameters_but_not_cast_buffers(rank, world):
    model, out = run_spy(param_dtype=BF16)
    assert model.seen == {"x": BF16, "weight": BF16, "buffer": FP32, "nested": BF16, "count": torch.int64}
    assert out["out"].dtype == BF16
    out["out"].float().sum().backward()
    for name, param in model.named_parameters():
        assert param.dtype == FP32, name
        assert param.grad.dtype == FP32, name


@distributed(world=2)
def test_inputs_keep_their_dtype_without_cast_forward_inputs(rank, world):
    model, _ = run_spy(param_dtype=BF16, cast_forward_inputs=False)
    assert model.seen["x"] == FP32
    assert model.seen["nested"] == FP32
    assert model.seen["weight"] == BF16


@distributed(world=2)
def test_outputs_are_cast_to_the_output_dtype_except_integers(rank, world):
    _, out = run_spy(param_dtype=BF16, output_dtype=FP32)
    assert out["out"].dtype == FP32
    assert out["count"].dtype == torch.int64


# ---- parameters excluded from the policy


@dataclasses.dataclass(frozen=True)
class Overriding(MixedPrecisionPolicy):
    """The field that torch 2.15 has added to its policy."""

    param_dtype_override_fn: Any = None


HAS_OVERRIDES = "param_dtype_override_fn" in {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}


def keep_scales(param):
    return FP32 if param.ndim == 1 else None


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x):
        assert (self.weight.dtype, self.scale.dtype) == (BF16, FP32)
        return F.linear(x.to(BF16), self.weight).float() * self.scale


@distributed(world=2)
def test_single_parameters_keep_their_dtype(rank, world):
    kind = MixedPrecisionPolicy if HAS_OVERRIDES else Overriding
    policy = kind(param_dtype=BF16, reduce_dtype=FP32, param_dtype_override_fn=keep_scales)
    torch.manual_seed(3)
    plain = Scaled()
    models = {name: copy.deepcopy(plain) for name in (ENGINES if HAS_OVERRIDES else ("ours",))}
    for name, model in models.items():
        ENGINES[name](model, mp_policy=policy)
    x = torch.randn(3, 4)
    for model in models.values():
        model(x).square().mean().backward()
    weight = plain.weight.to(BF16)
    (F.linear(x.to(BF16), weight).float() * plain.scale).square().mean().backward()
    for name, want in plain.named_parameters():
        for model in models.values():
            got = model.get_parameter(name)
            assert got.dtype == FP32
            assert torch.equal(got.grad.full_tensor(), want.grad), name
    gathered = {param.fqn: param.gathered for param in make_plan(models["ours"]).groups[0].params}
    assert gathered == {"weight": BF16, "scale": FP32}
    torch._dynamo.reset()
    run = torch.compile(copy.deepcopy(models["ours"]), backend="aot_eager", fullgraph=True)
    assert torch.equal(run(x), models["ours"](x))


@distributed(world=1)
def test_a_third_dtype_is_an_error(rank, world):
    kind = MixedPrecisionPolicy if HAS_OVERRIDES else Overriding
    policy = kind(param_dtype=BF16, param_dtype_override_fn=lambda param: torch.float16)
    with pytest.raises(ValueError, match=r"override_fn: returned torch.float16 for parameter weight; expected"):
        fully_shard(Scaled(), mp_policy=policy)
