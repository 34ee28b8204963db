"""Checkpoints store the rounding state of gradients. A run resumes bit for bit, or on another number of ranks."""

import pytest
import torch

from _blocks import Transformer, next_token_loss, token_batch
from _pool import simulated
from composable_shard import CommPolicy, Ragged, checkpoint, fully_shard
from composable_shard.testing import spmd


class Run:
    def __init__(self, rank, choose=None):
        torch.manual_seed(0)
        self.rank, self.model = rank, Transformer()
        for module in (*self.model.blocks, self.model):
            fully_shard(module, shard_placement_fn=choose)
        self.model.set_comm_policy(CommPolicy("fp8", "int8", block=16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "rounding": checkpoint.RoundingState(self.model),
        }

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            next_token_loss(self.model, *token_batch(self.rank, step)).backward()
            self.optimizer.step()
        return {name: param.to_local().clone() for name, param in self.model.named_parameters()}

    @property
    def roundings(self):
        return [module._own_state().declaration.rounding for module in (*self.model.blocks, self.model)]


def ragged(param):
    return Ragged(5) if param.ndim == 2 else None


@pytest.mark.parametrize("choose", [None, ragged])
def test_a_run_resumes_bit_for_bit(choose, tmp_path):
    @simulated(world=2)
    def run(rank, world):
        first = Run(rank, choose)
        first.train(range(2))
        checkpoint.save(tmp_path, first.state, step=2)
        expected = first.train(range(2, 4))
        second = Run(rank, choose)
        checkpoint.load(tmp_path, second.state)
        for name, param in second.train(range(2, 4)).items():
            assert torch.equal(param, expected[name]), name
        third = Run(rank, choose)
        checkpoint.load(tmp_path, {name: third.state[name] for name in ("model", "optimizer")}, strict=False)
        others = third.train(range(2, 4))
        assert any(not torch.equal(param, expected[name]) for name, param in others.items())

    run()


def test_another_number_of_ranks_continues_at_the_same_position(tmp_path):
    def saved(here):
        run = Run(here.rank)
        run.train(range(2))
        checkpoint.save(tmp_path, run.state, step=2)
        return [each.number for each in run.roundings]

    def loaded(here):
        run = Run(here.rank)
        checkpoint.load(tmp_path, run.state)
        numbers = [each.number for each in run.roundings]
        run.train(range(2, 3))
        return numbers

    before, after = spmd(2)(saved), spmd(3)(loaded)
    assert min(before[0]) > 0
    assert after == [before[0]] * 3
