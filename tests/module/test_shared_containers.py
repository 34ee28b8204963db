"""Containers that blocks share: a block writes to a container and later blocks read it, e.g. shared keys and values.

FSDP2 gives each module a copy and loses the writes, so the reference is the unsharded model: in float32, or a bfloat16
copy of it. All ranks get the same data, so that the mean of their gradients is the gradient of the unsharded model.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from _blocks import Attention, SwiGLU, rotary, rotate
from _compiling import LIMIT_S
from _engines import ENGINES, fully_shard
from _pool import distributed, more, simulated
from _sides import noise, whole
from _stepping import assert_at_rest
from composable_shard._module.state import STATE
from composable_shard._torch.core import map_tensors, return_writes

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {
    "bf16": BF16,
    "none": None,
    "bf16, inputs as they are": dataclasses.replace(BF16, cast_forward_inputs=False),
    "bf16, float64 out": dataclasses.replace(BF16, output_dtype=torch.float64),
}
Pair = namedtuple("Pair", ["mask", "shared"])


class Words(dict):
    pass


class Items(list):
    pass


@dataclasses.dataclass
class State:
    found: Any = None

    def __setitem__(self, key, value):
        self.found = {**(self.found or {}), key: value}

    def __getitem__(self, key):
        return self.found[key]


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


class Space(SimpleNamespace):
    def __setitem__(self, key, value):
        setattr(self, f"_{key}", value)

    def __getitem__(self, key):
        return getattr(self, f"_{key}")


class Cache:
    """An object that is not a container."""

    def __init__(self):
        self.layers = {}

    def __setitem__(self, key, value):
        self.layers[key] = value

    def __getitem__(self, key):
        return self.layers[key]


class Node(Cache):
    """Registered as a pytree node, as some versions of Transformers do with their caches."""

    @classmethod
    def made_of(cls, values, keys):
        made = cls()
        made.layers.update(zip(keys, values, strict=True))
        return made


pytree.register_pytree_node(Node, lambda node: ([*node.layers.values()], [*node.layers]), Node.made_of)


KINDS = {
    "dict": dict,
    "ordered dict": OrderedDict,
    "default dict": lambda: defaultdict(list),
    "dict of a class": Words,
    "list": lambda: [None] * 2,
    "list of a class": lambda: Items([None] * 2),
    "deque": lambda: deque([None] * 2),
    "user dict": UserDict,
    "user list": lambda: UserList([None] * 2),
    "dataclass": State,
    "namespace": Space,
    "cache": Cache,
    "registered node": Node,
}
LEFT_ALONE = ("deque", "user dict", "user list", "namespace", "cache", "registered node")  # as in FSDP2


WRAPPED = {  # how a container is passed to the blocks
    "alone": lambda shared, also: shared,
    "in a dict in a list": lambda shared, also: [{"inner": shared, "scale": 2.0}],
    "with a mask": lambda shared, also: Pair(also > 0, shared),
    "with a tensor to cast": lambda shared, also: (also, [shared, {"also": also}]),
}


def unwrapped(given):
    if isinstance(given, Pair):
        return given.shared
    if isinstance(given, tuple):
        return given[1][0]
    if type(given) is list and given and isinstance(given[0], dict) and "inner" in given[0]:
        return given[0]["inner"]
    return given


class Block(nn.Module):
    """Attention with shared keys and values, which the first two blocks compute and all blocks use."""

    def __init__(self, index, kept):
        super().__init__()
        self.norm, self.feed_forward = nn.RMSNorm(8), SwiGLU(8, 12)
        self.q, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        if index < 2:  # the second block adds to the keys of the first
            self.k = nn.Linear(8, 8, bias=False)
        if index == 0:
            self.v = nn.Linear(8, 8, bias=False)
        self.index, self.kept = index, kept

    def heads(self, layer, y):
        return layer(y).unflatten(-1, (2, 4)).transpose(1, 2)

    def forward(self, x, given, *, positions, causal=True, dropout=None):
        shared, y = unwrapped(given), self.norm(x)
        kept = self.kept or y.dtype
        if self.index == 0:
            shared[0] = rotate(self.heads(self.k, y), *positions).to(kept)
            shared[1] = self.heads(self.v, y).to(kept)
        if self.index == 1:
            shared[0] = (shared[0].to(y.dtype) + self.heads(self.k, y)).to(kept)
            shared[1] = (shared[1].to(y.dtype) * 2).to(kept)
        key, value = (shared[at].to(y.dtype) for at in range(2))
        attended = F.scaled_dot_product_attention(
            rotate(self.heads(self.q, y), *positions), key, value, is_causal=causal
        )
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(x)


class Sharing(nn.Module):
    def __init__(self, kind, wrap="alone", kept=None, run=None):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block(index, kept) for index in range(3))
        self.kind, self.wrap, self.run, self.last = kind, wrap, run, None

    def forward(self, x):
        x, positions = self.embed(x), rotary(x.shape[1], 4)
        shared = KINDS[self.kind]()
        given = WRAPPED[self.wrap](shared, positions[0])
        for block in self.blocks:
            if self.run is None:
                x = block(x, given, positions=positions)
            else:
                x = self.run(block, x, given, positions=positions)
        self.last = shared
        return self.head(x.to(self.head.weight.dtype))


def shard(model, policy, engine=fully_shard):
    options = {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        engine(block, **options)
    root = {} if policy is None else {"mp_policy": dataclasses.replace(policy, output_dtype=None)}
    engine(model, **root)
    return model


def reference(plain, policy, x):
    """The unsharded model in the dtype of compute, whose gradients are copied to the plain model."""
    if policy is None:
        return plain, x
    return copy.deepcopy(plain).to(torch.bfloat16), x.to(torch.bfloat16)


def train_alike(make, policy, run=lambda model: model, steps=2):
    """Train and evaluate a sharded model and the unsharded one; results must be bitwise identical."""
    torch.manual_seed(3)
    plain = make()
    model = shard(copy.deepcopy(plain), policy)
    call = run(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(steps):
        x = noise(2, 5, 6, seed=step)
        half, given = reference(plain, policy, x)
        x = given if policy is not None and not policy.cast_forward_inputs else x
        out, wanted = call(x), half(given)
        assert torch.equal(out, wanted), f"step {step}"
        for each in (out, wanted):
            each.square().mean().backward()
        for (name, param), computed in zip(plain.named_parameters(), half.parameters(), strict=True):
            assert computed.grad is not None, name
            param.grad = computed.grad.to(param.dtype)
            assert torch.equal(whole(model.get_parameter(name).grad), param.grad), f"{name} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            half, given = reference(plain, policy, x)
            assert torch.equal(call(x), half(given)), f"evaluation after step {step}"
    assert all(not module.__dict__[STATE].copies for module in (model, *model.blocks))
    model.last = None  # keeps the graph of the last forward alive
    if call is model:
        assert_at_rest(model)


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world=2)
def test_later_blocks_see_writes_to_a_shared_container(rank, world, policy):
    for kind in KINDS:
        train_alike(lambda kind=kind: Sharing(kind), POLICIES[policy])
    for wrap in WRAPPED:
        train_alike(lambda wrap=wrap: Sharing("dict", wrap), POLICIES[policy])


@pytest.mark.parametrize(
    "wrap", ["alone", more("in a dict in a list"), more("with a mask"), more("with a tensor to cast")]
)
@distributed(world=2)
def test_later_blocks_see_writes_to_a_shared_container_that_is_cast(rank, world, wrap):
    for kind in KINDS:
        train_alike(lambda kind=kind: Sharing(kind, wrap, torch.float32), BF16)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # FSDP2 warns because the output is a view
def test_fsdp2_loses_what_a_block_writes():
    with cs.testing.fake(2):
        model = shard(Sharing("dict"), BF16, ENGINES["fsdp2"])
        with pytest.raises(KeyError):
            model(noise(2, 5, 6))


@pytest.mark.parametrize("kind", LEFT_ALONE)
@distributed(world=2)
def test_containers_that_fsdp2_passes_unchanged_train_like_fsdp2(rank, world, kind):
    torch.manual_seed(3)
    plain, x = Sharing(kind, kept=torch.float32), noise(2, 5, 6)
    models = [shard(copy.deepcopy(plain), BF16, engine) for engine in ENGINES.values()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # FSDP2 warns because the output is a view
        outs = [model(x) for model in models]
    assert torch.equal(*outs)
    for model, out in zip(models, outs, strict=True):
        out.float().square().mean().backward()
        assert model.last[0].dtype == torch.float32
    for (name, mine), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(whole(mine.grad), whole(other.grad)), name


# ---- checkpoints, other methods, compiled blocks


def checkpointed(reentrant):
    def run(block, *args, **kwargs):
        if reentrant:  # reentrant checkpoints accept no keyword arguments
            return checkpoint(lambda *given: block(*given, **kwargs), *args, use_reentrant=True)
        return checkpoint(block, *args, use_reentrant=False, **kwargs)

    return run


def as_method(block, *args, **kwargs):
    cs.register_fsdp_forward_method(block, "attend")
    return block.attend(*args, **kwargs) if isinstance(block, cs.FSDPModule) else block(*args, **kwargs)


Block.attend = Block.forward


@pytest.mark.parametrize("kept", [None, more(torch.float32)], ids=["as computed", "float32"])
@distributed(world=2)
def test_recomputed_blocks_and_forward_methods_see_writes_to_a_shared_container(rank, world, kept):
    for run in (checkpointed(False), as_method):
        for kind in ("dict", "list", "user dict", "dataclass"):
            train_alike(lambda kind=kind, run=run: Sharing(kind, kept=kept, run=run), BF16)


def compile_blocks(model):
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def compile_whole(model):
    torch._dynamo.reset()
    return cs.compile(model, backend="aot_eager", fullgraph=True)


COMPILED = [(compile_blocks, "dict", torch.float32, "bf16"), (compile_whole, "dict", torch.float32, "bf16")]
OTHERS = [(compile_blocks, "list", None, "bf16"), (compile_whole, "list", torch.float32, "bf16")]
OTHERS += [(compile_whole, "dict", None, policy) for policy in ("none", "bf16")]


@pytest.mark.parametrize(
    ("way", "kind", "kept", "policy"), [COMPILED[0], *[more(*each) for each in (*OTHERS, COMPILED[1])]]
)
@distributed(world=2, limit_s=LIMIT_S)
def test_compiled_code_sees_writes_to_a_shared_container(rank, world, way, kind, kept, policy):
    train_alike(lambda: Sharing(kind, kept=kept), POLICIES[policy], way)


class Read(nn.Module):
    """A block that reads a dict of float32 tensors."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(8, 2, 1, 0.0)

    def forward(self, x, given):
        return x + self.attention(x * given["scale"].to(x.dtype), *given["positions"])


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head, self.last = nn.ModuleList(Read() for _ in range(2)), nn.Linear(8, 6), None

    def forward(self, x):
        given = {"positions": rotary(x.shape[1], 4), "scale": torch.full((8,), 0.5), "calls": 0}
        x = F.pad(x, (0, 2))
        for block in self.blocks:
            x = checkpoint(block, x, given=given, use_reentrant=False)
        return self.head(x)


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_checkpoints_in_a_graph_accept_containers_that_are_cast(rank, world):
    train_alike(Reads, BF16, compile_whole)


# ---- outputs


class Keeps(Block):
    """Returns a dict that it also keeps."""

    def forward(self, x):
        self.kept_output = {"x": self.feed_forward(self.norm(x)), "again": [1]}
        return self.kept_output


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float32], ids=str)
@simulated(world=2)
def test_an_output_is_only_copied_if_a_tensor_in_it_is_cast(rank, world, output_dtype):
    block = fully_shard(Keeps(0, None), mp_policy=dataclasses.replace(BF16, output_dtype=output_dtype))
    out = block(noise(2, 5, 8))
    assert out["x"].dtype == output_dtype
    assert (out is block.kept_output) == (output_dtype == torch.bfloat16)
    assert out["again"] is block.kept_output["again"]
    out["x"].float().sum().backward()
    assert all((p.grad is None) == ("feed" not in n and "norm" not in n) for n, p in block.named_parameters())
    with torch.no_grad():
        assert (block(noise(2, 5, 8)) is block.kept_output) == (output_dtype == torch.bfloat16)


# ---- `map_tensors` and `return_writes`


def halved(tensor):
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor


def test_a_container_without_changes_is_shared_even_if_others_change():
    half, single = torch.ones(2).bfloat16(), torch.ones(2)
    for make in KINDS.values():
        shared = make()
        shared[0] = half
        for around in ([shared], {"a": (shared, None)}, Pair(torch.ones(2, dtype=torch.int64), shared), State(shared)):
            assert map_tensors(halved, around) is around
        pair, (first, second), listed = map_tensors(halved, (Pair(single, shared), (shared, single), [single, shared]))
        assert pair.shared is first is listed[1] is shared
        assert pair.mask.dtype == second.dtype == listed[0].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("dataclass", *LEFT_ALONE)])
def test_writes_to_copies_are_returned_and_cast_tensors_are_not(kind):
    owner, single, other = KINDS[kind](), torch.ones(2), torch.zeros(2)
    owner[0], owner[1] = single, {"inner": single}
    inner, copies = owner[1], []
    (made,) = map_tensors(halved, (owner,), copies)
    assert made is not owner
    return_writes(copies)
    assert owner[0] is single
    assert owner[1] is inner
    made[1]["other"] = other
    made[1]["same"] = made[0]
    made[0] = other
    return_writes(copies)
    assert owner[0] is other
    assert owner[1] is inner
    assert {key: part.dtype for key, part in inner.items()}["inner"] == torch.float32
    assert inner["other"] is other
    assert inner["same"] is single
    if isinstance(made, list):
        made.append(other)
        made.pop(0)
        return_writes(copies)
        assert list(owner) == [inner, other]
    else:
        del made[0]
        made["new"] = made[1]
        return_writes(copies)
        assert 0 not in owner
        assert owner["new"] is inner


def test_writes_to_the_copy_of_a_dataclass_are_returned():
    owner, copies = State([torch.ones(2)]), []
    made, *frozen = map_tensors(halved, (owner, Frozen(torch.ones(2))), copies)
    made.found, made.other = torch.zeros(2), frozen
    return_writes(copies)
    assert torch.equal(owner.found, torch.zeros(2))
    assert [copied.owner for copied in copies[1:]] == [owner]  # the inner list is first; the frozen one is not listed


@simulated(world=2)
def test_a_failed_forward_returns_no_writes_and_the_next_one_does(rank, world):
    class Fails(nn.Linear):
        def forward(self, x, given):
            given["seen"] = 1
            if given["fails"]:
                raise ArithmeticError
            return super().forward(x) * given["scale"]

    model = fully_shard(Fails(4, 4), mp_policy=BF16)
    given = {"fails": True, "scale": torch.ones(4)}
    with pytest.raises(ArithmeticError):
        model(torch.ones(2, 4), given)
    assert model.__dict__[STATE].copies == []
    given["fails"] = False
    model(torch.ones(2, 4), given=given).sum().backward()
    assert given["seen"] == 1
    assert given["scale"].dtype == torch.float32


def test_a_container_that_is_passed_twice_is_copied_once():
    class Appends(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x, first, both, second):
            first.append(1)
            assert both["list"][-1] == 1
            second.append(2)
            assert first[-1] == 2
            return self.inner(x)

    @simulated(world=1)
    def run(rank, world):
        module = fully_shard(Appends(), mp_policy=BF16)
        shared = [noise(2)]
        module(noise(3, 4), shared, {"list": shared}, second=shared)
        assert len(shared) == 3
        assert shared[0].dtype == torch.float32
        assert shared[1:] == [1, 2]

    run()
