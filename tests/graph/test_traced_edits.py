"""A compiled forward that edits its weights in place is an error, as in eager steps: the graph would lose the edit."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from _blocks import Transformer, TransformerBlock, next_token_loss, token_batch
from _engines import fully_shard
from _pool import distributed
from composable_shard.errors import StaleStateError

LOST = r"blocks\.1\.attention_norm\.weight: edited in place while unsharded"
EDITS = {
    "in place": lambda weight: weight.mul_(2),
    "through a view": lambda weight: weight.view(2, -1)[1].add_(1),
}


class EditingBlock(TransformerBlock):
    """A decoder block whose forward changes the scale of its first norm."""

    edit = None

    def forward(self, *args):
        if self.edit is not None:
            with torch.no_grad():
                self.edit(self.attention_norm.weight)
        return super().forward(*args)


def sharded_decoder(checkpoints):
    torch.manual_seed(0)
    model = Transformer()
    model.blocks[1] = EditingBlock(16, 4, 2, 24, 0.0)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        for block in each.blocks:
            if checkpoints:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            fully_shard(block, reshard_after_forward=True)
        fully_shard(each)
    return model, twin


@distributed(world=2, limit_s=120)
def test_a_compiled_forward_that_edits_its_weights_is_an_error(rank, world):
    model, _ = sharded_decoder(checkpoints=False)
    check_refused(model, EDITS["in place"], rank)


def check_refused(model, edit, rank):
    model.blocks[1].edit = edit
    torch._dynamo.reset()
    with pytest.raises(Exception, match=LOST):  # Dynamo determines the type
        next_token_loss(torch.compile(model, backend="eager", fullgraph=True), *token_batch(rank, 0))


@pytest.mark.matrix
@pytest.mark.parametrize("checkpoints", [False, True])
@distributed(world=2, limit_s=240)
def test_edits_are_errors_after_graph_breaks_and_training_without_edits_is_exact(rank, world, checkpoints):
    model, twin = sharded_decoder(checkpoints)
    for edit in EDITS.values():
        check_refused(model, edit, rank)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph breaks, and torch reads `.grad` of unsharded weights
        with pytest.raises(StaleStateError, match=LOST):
            next_token_loss(torch.compile(model, backend="eager"), *token_batch(rank, 0))
    model.blocks[1].edit = None
    torch._dynamo.reset()
    exact = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(2):
        for each in (exact, twin):
            next_token_loss(each, *token_batch(rank, step)).backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(param.grad.to_local(), other.grad.to_local())
            param.grad = other.grad = None
