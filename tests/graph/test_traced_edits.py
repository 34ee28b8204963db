"""A compiled forward that edits its weights in place is an error as in eager steps: the graph would lose the edit."""

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
from composable_shard import StaleStateError

LOST = r"blocks\.1\.attention_norm\.weight: edited in place while unsharded"
EDITS = {
    "in place": lambda weight: weight.mul_(2),
    "through a view": lambda weight: weight.view(2, -1)[1].add_(1),
}


class EditingBlock(TransformerBlock):
    """A decoder's block, the scale of whose first norm the forward changes."""

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


@pytest.mark.parametrize("checkpoints", [False, pytest.param(True, marks=pytest.mark.matrix)])
@distributed(world=2, limit_s=120)
def test_a_compiled_forward_that_edits_its_weights_is_an_error_and_without_the_edit_exact(rank, world, checkpoints):
    model, twin = sharded_decoder(checkpoints)
    broken = torch.compile(model, backend="eager")
    whole = torch.compile(model, backend="eager", fullgraph=True)
    for edit in EDITS.values():
        model.blocks[1].edit = edit
        torch._dynamo.reset()
        with pytest.raises(Exception, match=LOST):  # which kind is for Dynamo to say
            next_token_loss(whole, *token_batch(rank, 0))
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph breaks, and torch looks for `.grad` of unsharded weights
        with pytest.raises(StaleStateError, match=LOST):
            next_token_loss(broken, *token_batch(rank, 0))
    model.blocks[1].edit = None
    torch._dynamo.reset()
    exact = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(2):
        for each in (exact, twin):
            next_token_loss(each, *token_batch(rank, step)).backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(param.grad.to_local(), other.grad.to_local())
            param.grad = other.grad = None
