"""Classes whose `__call__` runs `super().__call__` in a checkpoint, like Transformers' decoder layers.

The recomputation then bypasses the class's `__call__`. It ends with an exception as soon as all saved tensors are
recomputed.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import composable_shard as cs
from _blocks import Transformer, TransformerBlock, next_token_loss, token_batch
from _engines import ENGINES, mesh_of
from _parity import whole
from _pool import distributed, more, simulated


class CheckpointedBlock(TransformerBlock):
    """A block that checkpoints itself in training."""

    how: dict[str, object] = {"use_reentrant": False}  # noqa: RUF012 - as classes of others have it

    def __call__(self, *args, **kwargs):
        if not self.training:
            return super().__call__(*args, **kwargs)
        return checkpoint(partial(super().__call__, **kwargs), *args, **self.how)


class TwiceCheckpointedBlock(CheckpointedBlock):
    """A block with a checkpoint in another one."""

    def __call__(self, *args, **kwargs):
        call = super().__call__
        return checkpoint(call, *args, use_reentrant=False) if self.training else call(*args, **kwargs)


class BoundBlock(CheckpointedBlock):
    """A block whose checkpoint gets no tensor argument: all are bound to its function."""

    def __call__(self, *args, **kwargs):
        if not self.training:
            return super().__call__(*args, **kwargs)
        return checkpoint(partial(super().__call__, *args, **kwargs), use_reentrant=False)


class ReentrantBlock(CheckpointedBlock):
    how = {"use_reentrant": True}  # noqa: RUF012


def _save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveBlock(CheckpointedBlock):
    how = {  # noqa: RUF012
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _save_products),
    }


class CheckpointedModel(Transformer):
    """A model whose root checkpoints itself too."""

    def __call__(self, *args, **kwargs):
        if not self.training:
            return super().__call__(*args, **kwargs)
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=False)


def build(kind=CheckpointedBlock, root=Transformer, **options):
    torch.manual_seed(11)
    model = root(dropout=0.1, **options)
    for block in model.blocks:
        block.__class__ = kind
    return model


def shard_each(model, fully_shard, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def shard_list(model, fully_shard, **options):
    fully_shard(list(model.blocks), **options)
    fully_shard(model, **options)


def shard_parts(model, fully_shard, **options):
    for block in model.blocks:
        fully_shard(block.attention, **options)
        fully_shard(block, **options)
    fully_shard(model, **options)


def losses(model, rank, steps=3, step_fn=None):
    """Losses of training steps and of an evaluation after each step, and the final parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    found, params = [], list(model.parameters())
    for step in range(steps):
        model.train()
        torch.manual_seed(5 + step)
        found.append((step_fn or _step)(model, rank, step).detach())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(next_token_loss(model, *token_batch(rank, 50 + step)))
    return found, [whole(p) for p in params]


def _step(model, rank, step):
    loss = next_token_loss(model, *token_batch(rank, step))
    loss.backward()
    return loss


def accumulate(model, rank, step):
    for micro in range(2):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(micro == 1)
        loss = next_token_loss(model, *token_batch(rank, 10 * step + micro))
        loss.backward()
    return loss


def assert_nothing_is_left(model):
    """Check that after a step all groups are sharded and no call is recorded."""
    for module in model.modules():
        if isinstance(module, cs.FSDPModule):
            state = module._own_state()
            for each in state.family:
                assert len(each.open_calls) <= 1, "the list of open calls grows with every step"
            for group in state.groups:
                assert group.running == 0
                assert group.phase.value == "sharded"


def compare(rank, plain, shard, step_fn=None, reference=True, atol=0.0, **options):
    """Compare ours with torch's FSDP2 and, if each rank has the same data, with the unsharded model."""
    found = {}
    for name, fully_shard in ENGINES.items():
        model = copy.deepcopy(plain)
        shard(model, fully_shard, **options)
        found[name] = losses(model, rank, step_fn=step_fn)
        if name == "ours":
            assert_nothing_is_left(model)
    torch.testing.assert_close(found["ours"], found["fsdp2"], rtol=0, atol=atol)
    if reference:
        alike = copy.deepcopy(plain)
        shard(alike, ENGINES["ours"], **options)
        torch.testing.assert_close(losses(alike, 0), losses(plain, 0), rtol=1e-5, atol=1e-6)


class CalledBelow(Transformer):
    """A model that checkpoints `nn.Module.__call__` of its blocks, which bypasses their classes' own `__call__`."""

    how: dict[str, object] = {"use_reentrant": False}  # noqa: RUF012
    nested = False

    def forward(self, tokens):
        if not self.training:
            return super().forward(tokens)
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            call = partial(torch.nn.Module.__call__, block)
            if self.nested:
                call = partial(checkpoint, call, **self.how)
            x = checkpoint(call, x, cos, sin, **self.how)
        return self.head(self.norm(x))


class CalledBelowTwice(CalledBelow):
    nested = True


class CalledBelowReentrant(CalledBelow):
    how = {"use_reentrant": True}  # noqa: RUF012


class CalledBelowSelective(CalledBelow):
    how = SelectiveBlock.how


BELOW = (CalledBelow, CalledBelowTwice, CalledBelowReentrant, CalledBelowSelective)


@pytest.mark.parametrize("shard", [shard_each, shard_list, shard_parts])
@pytest.mark.parametrize("root", BELOW)
@distributed(world=2)
def test_a_checkpoint_around_the_modules_own_call_is_exact(rank, world, root, shard):
    compare(rank, build(TransformerBlock, root), shard)


@pytest.mark.parametrize("root", BELOW)
@distributed(world=2)
def test_such_a_checkpoint_keeps_a_class_that_overrides_call(rank, world, root):
    """`nn.Module.__call__` runs neither the override nor the checkpoint in it."""
    compare(rank, build(CheckpointedBlock, root), shard_each)


KINDS = {
    each.__name__: each
    for each in (CheckpointedBlock, TwiceCheckpointedBlock, BoundBlock, ReentrantBlock, SelectiveBlock)
}


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_evaluation_after_each_step_uses_the_new_weights(rank, world, kind):
    compare(rank, build(KINDS[kind]), shard_each)


@pytest.mark.parametrize("shard", [shard_list, shard_parts])
@pytest.mark.parametrize("kind", ["CheckpointedBlock", more("ReentrantBlock"), more("BoundBlock")])
@distributed(world=2)
def test_lists_and_nested_groups_end_with_the_recomputation(rank, world, kind, shard):
    compare(rank, build(KINDS[kind]), shard)


@distributed(world=2)
def test_checkpoints_in_call_work_without_resharding_after_forward(rank, world):
    compare(rank, build(), shard_each, reshard_after_forward=False)


@distributed(world=4)
def test_checkpoints_in_call_work_with_resharding_to_a_few_ranks(rank, world):
    compare(
        rank, build(), shard_each, reference=False, atol=1e-4, reshard_after_forward=2, mesh=mesh_of(4)
    )  # gloo adds in another order


@distributed(world=2)
def test_checkpoints_in_call_work_in_accumulation_without_gradient_sync(rank, world):
    compare(rank, build(), shard_each, accumulate, reference=False)


@distributed(world=2)
def test_checkpoints_in_call_work_without_early_stop(rank, world):
    with set_checkpoint_early_stop(False):
        compare(rank, build(), shard_each)


@distributed(world=2)
def test_a_checkpoint_in_call_works_around_the_root(rank, world):
    compare(rank, build(root=CheckpointedModel), shard_each)
    compare(rank, build(TransformerBlock, CheckpointedModel), shard_each)


@distributed(world=2)
def test_checkpoints_in_call_work_in_mixed_precision_and_with_frozen_blocks(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    atol = 0 if torch.__version__ < "2.15" else 0.1  # in 2.15 a norm's gradient is float32; see docs/migration.md
    compare(rank, build(), shard_each, reference=False, atol=atol, mp_policy=policy)
    frozen = build()
    frozen.blocks[0].requires_grad_(False)
    frozen.blocks[1].attention.requires_grad_(False)
    compare(rank, frozen, shard_each)


@pytest.mark.parametrize("shard", [shard_each, shard_parts])
@pytest.mark.parametrize("kind", ["ReentrantBlock", more("CheckpointedBlock"), more("BoundBlock")])
@distributed(world=2)
def test_checkpoints_in_call_work_with_frozen_groups_between_trained_ones(rank, world, kind, shard):
    plain = build(KINDS[kind])
    plain.blocks[-1].requires_grad_(False)
    # with `shard_parts`, the block's group has only frozen parameters
    for name, param in plain.blocks[0].named_parameters():
        param.requires_grad_(name.startswith("attention"))
    compare(rank, plain, shard)


@distributed(world=2)
def test_a_step_after_a_failed_recomputation_is_exact(rank, world):
    class FailingError(Exception):
        pass

    found = {}
    for name, fully_shard in ENGINES.items():
        model = build()
        shard_each(model, fully_shard)
        for at, kind in enumerate((FailingError, KeyboardInterrupt)):
            loss = next_token_loss(model, *token_batch(rank, 90 + at))

            def fail(*_, kind=kind):
                raise kind

            hook = model.blocks[0].feed_forward.register_forward_pre_hook(fail)
            with pytest.raises(kind):
                loss.backward()
            hook.remove()
            if name == "fsdp2":
                model = build()  # FSDP2 does not recover
                shard_each(model, fully_shard)
        found[name] = losses(model, rank)
        if name == "ours":
            assert_nothing_is_left(model)
    torch.testing.assert_close(found["ours"], found["fsdp2"], rtol=0, atol=0)


@simulated(world=2)
def test_weights_are_resharded_as_soon_as_the_backward_of_their_block_ends(rank, world):
    model = build()
    shard_each(model, ENGINES["ours"])
    last = model.blocks[-1]
    seen = []

    def note(gradient):
        seen.extend(group.phase.value for group in last._own_state().groups)

    def listen(module, args, output):
        output.register_hook(note)

    model.embed.register_forward_hook(listen)
    for step in range(2):
        next_token_loss(model, *token_batch(rank, step)).backward()
    assert seen == ["sharded", "sharded"]


@pytest.mark.matrix
@distributed(world=2)
def test_checkpoints_in_call_work_with_blocks_compiled_one_by_one(rank, world):
    def shard_compiled(model, fully_shard, **options):
        for block in model.blocks:
            block.compile(backend="aot_eager")
        shard_each(model, fully_shard, **options)

    found = {}
    for name, fully_shard in ENGINES.items():
        model = build()
        shard_compiled(model, fully_shard)
        with warnings.catch_warnings():
            if name == "fsdp2":
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            found[name] = losses(model, rank)
    torch.testing.assert_close(found["ours"], found["fsdp2"])
