"""Realistic blocks compiled under every type of activation checkpoint, compared with several references.

The blocks have attention with rotary embeddings and grouped heads, norms, dropout, a feed-forward layer and experts.
All ranks get the same inputs, so the mean of their gradients is that of the unsharded model. With ``aot_eager``,
results are bitwise identical to the eager runtime and to the unsharded model; torch's FSDP2 and Inductor are close.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import pytest
import torch
import torch.nn as nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _compiling import LIMIT_S
from _engines import ENGINES
from _experts import Experts, SlottedMoE
from _models import shard_blocks
from _pool import distributed
from _sides import whole
from composable_shard.report import watch_graphs

with warnings.catch_warnings():  # Inductor's own imports warn
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]


class Routed(nn.Module):
    """Experts for the rows of a (batch, length, dim) input."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = SlottedMoE(4, Experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x.flatten(0, -2)).view_as(x)


def make():
    torch.manual_seed(3)
    model = Transformer(dim=8, heads=2, kv_heads=1, hidden=12, dropout=0.1)
    model.blocks[1].feed_forward = Routed()
    return model


# ---- types of checkpoints


def save_some(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS[1:] else CheckpointPolicy.PREFER_RECOMPUTE


LISTED = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
CHOSEN = functools.partial(create_selective_checkpoint_contexts, save_some)


def wrap(model, **options):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, **options)


def wrap_half(model):
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])


def wrap_parts(model):
    for block in model.blocks:
        block.attention = checkpoint_wrapper(block.attention)
        block.feed_forward = checkpoint_wrapper(block.feed_forward)


def call(model, **options):
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def compose(model):
    for block in model.blocks:
        composable(block)


def nothing(model):
    pass


BEFORE = {  # changes of the model before it is sharded
    "none": nothing,
    "wrapper": wrap,
    "wrapper, listed": functools.partial(wrap, context_fn=LISTED),
    "wrapper, every second block": wrap_half,
    "wrapper, within blocks": wrap_parts,
    "function": call,
    "function, chosen": functools.partial(call, context_fn=CHOSEN),
}
AFTER = {"wrapper around": wrap, "wrapper around, chosen": functools.partial(wrap, context_fn=CHOSEN)}


def sharded(kind, engine, mp_policy=None):
    model = make()
    BEFORE.get(kind, nothing)(model)
    inner = {} if mp_policy is None else {"mp_policy": dataclasses.replace(mp_policy, output_dtype=None)}
    for block in model.blocks:
        engine(block, **inner)
    AFTER.get(kind, nothing)(model)
    engine(model, **({} if mp_policy is None else {"mp_policy": mp_policy}))
    return model


# ---- the comparison


def named(model):
    return {name.replace("_checkpoint_wrapped_module.", ""): param for name, param in model.named_parameters()}


def seeded(model, step, length):
    torch.manual_seed(step)
    (tokens,) = token_batch(0, step)
    return next_token_loss(model, tokens[:, :length])


def agree(rank, kind, mp=None, lengths=(8, 8, 8), exact=("plain", "eager"), close=1e-4, **compile_options):
    """Train all implementations, take one step more, and evaluate; returns the graphs of the compiled one."""
    ours = sharded(kind, cs.fully_shard, mp)
    models = {
        "plain": make(),
        "eager": sharded(kind, cs.fully_shard, mp),
        "fsdp2": sharded(kind, ENGINES["fsdp2"], None if mp is None else torch_policy(mp)),
    }
    BEFORE.get(kind, nothing)(models["plain"]), AFTER.get(kind, nothing)(models["plain"])
    torch._dynamo.reset()
    runs = {**models, "compiled": cs.compile(ours, **compile_options)}
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (*models.values(), ours)]
    with watch_graphs() as found:
        for step, length in enumerate(lengths):
            losses = {name: seeded(run, step, length) for name, run in runs.items()}
            for loss in losses.values():
                loss.backward()
            got = {name: whole(param.grad) for name, param in named(ours).items()}
            for side, model in models.items():
                tolerance = {"rtol": 0, "atol": 0} if side in exact else {"rtol": close, "atol": close}
                torch.testing.assert_close(losses["compiled"], losses[side], **tolerance)
                for name, param in named(model).items():
                    torch.testing.assert_close(
                        got[name], whole(param.grad), **tolerance, msg=lambda m, s=side, n=name: f"{s}: {n}: {m}"
                    )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trained = [(report.direction, report.sequence.count("G")) for report in found]
    with torch.no_grad():
        (tokens,) = token_batch(0, 9)
        outputs = {name: run.eval()(tokens) for name, run in runs.items()}
    for side in models:
        tolerance = {"rtol": 0, "atol": 0} if side in exact else {"rtol": 10 * close, "atol": 10 * close}
        assert outputs["compiled"].dtype is outputs[side].dtype or side == "plain"
        torch.testing.assert_close(outputs["compiled"], outputs[side], **tolerance, check_dtype=False)
    pool = ours._shard_state.bound.engine.pool
    pool.collect()
    assert pool.live_bytes == 0
    return trained


def torch_policy(mp):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(mp.param_dtype, mp.reduce_dtype, mp.output_dtype)


ONE_EACH_WAY = [("forward", 3), ("backward", 2)]  # the root's own group stays unsharded


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [*BEFORE, *AFTER])
@distributed(world=2, limit_s=2 * LIMIT_S)
def test_blocks_under_every_type_of_checkpoint_are_bitwise_identical_to_the_unsharded_model(rank, world, kind):
    assert agree(rank, kind, backend="aot_eager") == ONE_EACH_WAY


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_torchs_composable_checkpoint_breaks_the_graph_of_sharded_and_unsharded_models(rank, world):
    for shards in (False, True):
        model = Transformer()
        compose(model)
        if shards:
            shard_blocks(model, cs.fully_shard)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="_checkpoint_without_reentrant_generator"):
            torch.compile(model, backend="aot_eager", fullgraph=True)(*token_batch(rank, 0))


HALF = cs.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["wrapper, listed", "wrapper around"])
@distributed(world=2, limit_s=2 * LIMIT_S)
def test_mixed_precision_is_close_to_eager_and_has_its_output_dtype(rank, world, kind):
    graphs = agree(rank, kind, mp=HALF, exact=(), close=0.1, backend="aot_eager")  # AOTAutograd sums in float32
    assert graphs == ONE_EACH_WAY


@pytest.mark.matrix
@distributed(world=2, limit_s=2 * LIMIT_S)
def test_sequence_lengths_may_change_in_one_dynamic_graph(rank, world):
    assert agree(rank, "wrapper", lengths=(8, 6, 5), backend="aot_eager", dynamic=True) == ONE_EACH_WAY


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"mode": "max-autotune-no-cudagraphs"}], ids=["default", "max-autotune"])
@distributed(world=2, limit_s=2 * LIMIT_S)
def test_inductor_in_each_mode(rank, world, options):
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # raised in torch's autotuning
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False, fallback_random=True),
    ):
        assert agree(rank, "wrapper", exact=(), **options) == ONE_EACH_WAY
