"""Autograd saves handles of parameters and gets the parameters back in backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn as nn

from _leases import lease
from _models import shard_blocks, vectors
from _pool import distributed
from _stepping import OneLinear, assert_same_gradients, pool_of, shard_whole, twins
from composable_shard._group.saved_tensors import Handle, _Flattened, _Hooks


@contextlib.contextmanager
def watched():
    """Record each `pack`, as (the tensor's shape, the packed object), and each `unpack`, as (packed object, tensor)."""
    packed, unpacked = [], []
    real_pack, real_unpack = _Hooks.pack, _Hooks.unpack

    def pack(hooks, tensor):
        found = real_pack(hooks, tensor)
        packed.append((tuple(tensor.shape), found))
        return found

    def unpack(hooks, found):
        tensor = real_unpack(hooks, found)
        unpacked.append((found, tensor))
        return tensor

    _Hooks.pack, _Hooks.unpack = pack, unpack
    try:
        yield packed, unpacked
    finally:
        _Hooks.pack, _Hooks.unpack = real_pack, real_unpack


def is_handle(found):
    return isinstance(found, Handle | _Flattened)


# ---- handles


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=(1, 2))
def test_parameters_are_saved_as_handles_and_activations_as_tensors(rank, world, reshard):
    model, plain = twins(OneLinear, shard_whole, reshard_after_forward=reshard)
    x = vectors(0, 0)[0].requires_grad_()
    with watched() as (packed, _):
        out = model(x)
    handles = [found for _, found in packed if is_handle(found)]
    assert [tuple(handle.place.shape) for handle in handles] == [(4, 3)], "only the transposed weight, not the bias"
    assert handles[0].place.stride == (1, 4)
    assert handles[0].place.offset == 0
    activations = {shape for shape, found in packed if not is_handle(found)}
    assert activations == {(5, 4), (5, 3)}
    out.sum().backward()
    plain(vectors(0, 0)[0]).sum().backward()
    assert_same_gradients(model, plain)


@distributed(world=(1, 2))
def test_a_graph_holds_no_memory_of_a_resharded_group(rank, world):
    model, _ = twins(reshard_after_forward=True)
    with watched() as (packed, _):
        loss = model(*vectors(0, 0)).sum()
    assert pool_of(model).live_bytes == 0
    kept = [found[0] for _, found in packed if not is_handle(found)]
    spans = [(slot.begin, slot.end) for slot in pool_of(model).addresses]
    assert spans
    assert not any(begin <= t.data_ptr() < end for t in kept for begin, end in spans)
    loss.backward()


class Viewing(nn.Module):
    """Saves many views of its weights."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 5))
        self.b = nn.Parameter(torch.randn(5, 6))
        self.c = nn.Parameter(torch.randn(7))

    def forward(self, x):
        x = x @ self.a[1:5].t() @ self.a[:4, 1:]
        x = x * self.b.t()[2:6:2].sum(0)[:4] * self.c[3:7]
        return x @ self.a.view(5, 6)[:4, ::2] * self.b.flatten()[3:6] * self.c[None, :3].expand(5, 3)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 5)
        self.viewing = Viewing()

    def forward(self, x):
        return self.viewing(torch.tanh(self.lin(x)))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=(1, 2))
def test_views_and_transposes_of_parameters_are_restored(rank, world, reshard):
    model, plain = twins(Wide, shard_whole, reshard_after_forward=reshard)
    with watched() as (packed, unpacked):
        for m in (model, plain):
            m(*vectors(0, 0)).square().sum().backward()
    handles = [found for _, found in packed if is_handle(found)]
    assert len(handles) > 5
    assert len({(p.offset, p.shape, p.stride) for p in (handle.place for handle in handles)}) > 5
    for found, tensor in unpacked:
        if is_handle(found):
            assert (tensor.shape, tensor.stride()) == (found.place.shape, found.place.stride)
    assert_same_gradients(model, plain)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.v = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return (
            x.to(self.w.dtype) @ self.w.conj() @ torch.view_as_complex(self.v[:, None, :])
        ).abs() * self.w.real.sum()


def check_complex():
    model, plain = twins(Complex, shard_whole)
    for m in (model, plain):
        m(*vectors(0, 0)).sum().backward()
    assert_same_gradients(model, plain)


@distributed(world=1)
def test_conjugates_and_views_in_another_dtype_are_exact(rank, world):
    check_complex()


@distributed(world=2)
def test_complex_parameters_are_communicated(rank, world):
    check_complex()


class Parent(nn.Module):
    """Also uses a parameter of its sharded child after the child's forward."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.own = nn.Linear(4, 4)

    def forward(self, x):
        x = self.own(self.child(x))
        return x @ self.child.weight


def shard_child(model, fully_shard, **options):
    fully_shard(model.child, reshard_after_forward=False)
    fully_shard(model, **options)


@distributed(world=(1, 2))
def test_a_childs_parameter_that_its_parent_saves_is_a_handle_too(rank, world):
    model, plain = twins(Parent, shard_child)
    with watched() as (packed, _):
        for m in (model, plain):
            m(*vectors(0, 0)).square().sum().backward()
    handles = [found for _, found in packed if is_handle(found)]
    assert len({id(handle.bucket) for handle in handles}) == 2
    assert_same_gradients(model, plain)


# ---- slots that move or are reused


def poison(model):
    """Fill all memory that the pool might hand out with NaN."""
    for slots in pool_of(model)._free.values():
        for slot in slots:
            slot.typed(torch.uint8).fill_(255)  # the bytes of a NaN in every floating dtype


@pytest.mark.parametrize("shard", [shard_blocks, shard_whole])
@pytest.mark.parametrize("reshard", [None, True])
@distributed(world=(1, 2))
def test_backward_is_exact_after_free_slots_were_overwritten(rank, world, shard, reshard):
    model, plain = twins(shard=shard, reshard_after_forward=reshard)
    for step in range(3):
        loss = model(*vectors(0, step)).square().sum()
        poison(model)
        loss.backward()
        poison(model)
        plain(*vectors(0, step)).square().sum().backward()
        assert_same_gradients(model, plain)


@distributed(world=(1, 2))
def test_backward_is_exact_if_parameters_are_gathered_into_other_slots(rank, world):
    model, plain = twins(reshard_after_forward=True)
    for step in range(3):
        loss = model(*vectors(0, step)).square().sum()
        pool = pool_of(model)
        others = [lease(pool, slot.nbytes) for slot in list(pool.addresses) if slot.owner is None]
        for slot in others:
            slot.typed(torch.uint8).fill_(255)
        loss.backward()
        for slot in others:
            pool.release(slot)
        plain(*vectors(0, step)).square().sum().backward()
        assert_same_gradients(model, plain)


@distributed(world=(1, 2))
def test_autograd_gets_a_copy_of_a_parameter_only_with_create_graph(rank, world):
    model, plain = twins(OneLinear, shard_whole)
    for create_graph in (True, False):
        x = vectors(0, 0)[0].requires_grad_()
        with watched() as (_, unpacked):
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
        weights = [tensor for found, tensor in unpacked if is_handle(found)]
        slots = [(slot.begin, slot.end) for slot in pool_of(model).addresses]
        inside = [any(begin <= w.data_ptr() < end for begin, end in slots) for w in weights]
        assert inside == [not create_graph]
        if create_graph:
            poison(model)
            grad.square().sum().backward()
            y = vectors(0, 0)[0].requires_grad_()
            torch.autograd.grad(plain(y).sum(), y, create_graph=True)[0].square().sum().backward()
            assert torch.equal(model.lin.weight.grad.full_tensor(), plain.lin.weight.grad)
