"""Saved tensors together with users' own saved-tensor hooks, and edits in place."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from _models import Stack, vectors
from _pool import distributed
from _stepping import OneLinear, assert_same_gradients, pool_of, shard_whole, twins
from composable_shard import CommPolicy
from composable_shard._group.saved_tensors import _Hooks
from composable_shard._torch.core import active_saved_tensors_hooks
from composable_shard.errors import SavedTensorModifiedError

# ---- hooks of users


class Counting:
    """A user's hooks, which record their calls."""

    def __init__(self):
        self.packed, self.unpacked = [], 0

    def hooks(self):
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor):
        self.packed.append(tensor)
        return [tensor.clone()]

    def unpack(self, packed):
        self.unpacked += 1
        return packed[0]


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=(1, 2))
def test_users_hooks_see_activations_and_no_parameters(rank, world, reshard):
    model, plain = twins(reshard_after_forward=reshard)
    seen = []
    for m in (model, plain):
        counting = Counting()
        with counting.hooks():
            out = m(*vectors(0, 0))
        out.square().sum().backward()
        assert counting.unpacked == len(counting.packed) > 0
        seen.append(counting.packed)
    ours, theirs = seen
    weights = {p.untyped_storage().data_ptr() for p in plain.parameters()}
    activations = [t for t in theirs if t.untyped_storage().data_ptr() not in weights]
    assert len(activations) < len(theirs)
    assert [tuple(t.shape) for t in ours] == [tuple(t.shape) for t in activations]
    spans = [(slot.begin, slot.end) for slot in pool_of(model).addresses]
    assert not any(begin <= t.data_ptr() < end for t in ours for begin, end in spans)
    assert_same_gradients(model, plain)


@distributed(world=(1, 2))
def test_activation_offloading_works_around_a_sharded_model(rank, world):
    model, plain = twins()
    for step in range(2):
        for m in (model, plain):
            with save_on_cpu():
                loss = m(*vectors(0, step)).square().sum()
            loss.backward()
        assert_same_gradients(model, plain)


class HookedInside(Stack):
    """Sets its own hooks within a sharded forward. These see parameters, as in plain torch."""

    def forward(self, x):
        x = self.inp(x)
        with save_on_cpu():
            for block in self.blocks:
                x = F.gelu(block(x))
        return self.head(x)


@distributed(world=(1, 2))
def test_hooks_set_between_sharded_modules_are_called(rank, world):
    model, plain = twins(HookedInside)
    for step in range(2):
        for m in (model, plain):
            m(*vectors(0, step)).square().sum().backward()
        assert_same_gradients(model, plain)


@distributed(world=(1, 2))
def test_hooks_are_removed_after_a_forward_even_if_it_fails(rank, world):
    model, _ = twins()
    assert active_saved_tensors_hooks() is None
    model(*vectors(0, 0))
    assert active_saved_tensors_hooks() is None
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 3))
    assert active_saved_tensors_hooks() is None


@distributed(world=1)
def test_without_gradients_no_hooks_are_set(rank, world):
    model, _ = twins(OneLinear, shard_whole)
    seen = []
    model.lin.register_forward_hook(lambda *_: seen.append(active_saved_tensors_hooks()))
    with torch.no_grad():
        model(*vectors(0, 0))
    model(*vectors(0, 0))
    assert seen[0] is None
    assert isinstance(seen[1][0].__self__, _Hooks)


@distributed(world=1)
def test_modules_of_a_model_share_its_hooks(rank, world):
    model, _ = twins()
    seen = []
    for module in (model.inp, model.blocks[0].up, model.blocks[2].up, model.head):
        module.register_forward_hook(lambda *_: seen.append(active_saved_tensors_hooks()[0].__self__))
    model(*vectors(0, 0))
    assert len(seen) == 4
    assert all(hooks is seen[0] for hooks in seen)


# ---- edits in place


class Edited(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.sigmoid(self.lin(x))
        out = h * h
        h.add_(1)
        return out


@distributed(world=(1, 2))
def test_an_activation_edited_in_place_is_an_error_with_its_shape_and_versions(rank, world):
    model, _ = twins(Edited, shard_whole)
    for _ in range(2):
        loss = model(*vectors(0, 0)).sum()
        words = "a tensor of shape (5, 3) and dtype torch.float32, saved in forward for backward, was modified"
        with pytest.raises(SavedTensorModifiedError, match=re.escape(words)) as caught:
            loss.backward()
        assert isinstance(caught.value, RuntimeError)
        assert "at version 1, expected 0" in str(caught.value)
        assert "out-of-place" in str(caught.value)


@pytest.mark.parametrize("policy", [None, CommPolicy("int8", "int8", block=8)])
@distributed(world=2)
def test_the_error_names_a_parameter_that_was_edited_before_backward(rank, world, policy):
    model, _ = twins(OneLinear, shard_whole, reshard_after_forward=False)
    if policy is not None:
        model.set_comm_policy(policy)
    loss = model(vectors(0, 0)[0].requires_grad_()).sum()
    with torch.no_grad():
        model.lin.weight.mul_(2)
    with pytest.raises(SavedTensorModifiedError, match=r"parameter lin\.weight: its unsharded copy was modified"):
        loss.backward()


@distributed(world=(1, 2))
def test_an_edit_in_place_that_autograd_allows_is_exact(rank, world):
    class Allowed(OneLinear):
        def forward(self, x):
            return F.relu(self.lin(x).mul_(2).add_(1), inplace=True)

    model, plain = twins(Allowed, shard_whole)
    for m in (model, plain):
        m(*vectors(0, 0)).square().sum().backward()
    assert_same_gradients(model, plain)


@distributed(world=(1, 2))
def test_an_input_edited_after_forward_raises_as_in_plain_torch(rank, world):
    for m in twins(OneLinear, shard_whole):
        x = vectors(0, 0)[0]
        loss = m(x).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"in-?place"):
            loss.backward()
