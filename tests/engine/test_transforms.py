"""Transforms of `torch.func`, and operators that take functions, inside and around the forward of sharded modules."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn as nn
from torch.autograd import forward_ad

from _blocks import SwiGLU
from _engines import ENGINES
from _pool import distributed, more
from _stepping import assert_at_rest
from composable_shard.errors import StaleStateError

func = torch.func


def jvp(layer, x):
    return sum(func.jvp(layer.body, (x,), (torch.ones_like(x),)))


def vmap(layer, x):
    return func.vmap(layer.body)(x)


def grad(layer, x):
    return layer.body(x) + func.grad(lambda v: layer.body(v).tanh().sum())(x)


def vjp(layer, x):
    out, back = func.vjp(layer.body, x)
    return out + back(torch.ones_like(out))[0]


def jacrev(layer, x):
    return layer.body(x) + func.vmap(func.jacrev(layer.body))(x).sum(1)


def jacfwd(layer, x):
    return layer.body(x) + func.vmap(func.jacfwd(layer.body))(x).sum(1)


def hessian(layer, x):
    return layer.body(x) + func.vmap(func.hessian(lambda v: layer.body(v).square().sum()))(x).sum(1)


def of_weights(layer, x):
    weight = layer.mlp.up.weight
    slope = func.grad(lambda w: (x @ w.T).tanh().sum())(weight)
    return layer.body(x) + x @ slope.T.tanh().sum(1, keepdim=True)


def linearize(layer, x):
    out, tangents = func.linearize(layer.mlp, x)
    return layer.body(x) + out + tangents(torch.ones_like(x))


def assigned(layer, x):
    """The attributes of another module, assigned in forward, are the parameters that forward sees."""
    again = nn.Linear(6, 10, bias=False, device="meta")
    again.weight = layer.mlp.up.weight
    return layer.body(x) + again(x).sum(1, keepdim=True)


def forward_mode(layer, x):
    with forward_ad.dual_level():
        return sum(forward_ad.unpack_dual(layer.body(forward_ad.make_dual(x, torch.ones_like(x)))))


def cond(layer, x):
    return torch.cond(x.sum() > 0, layer.body, lambda v: layer.mlp(v) - layer.mlp.down(layer.mlp.up(v)), (x,))


def while_loop(layer, x):
    with torch.no_grad():
        _, turned = torch.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, layer.mlp(v)), (torch.tensor(0), x))
    return layer.body(x) + turned


WAYS = {
    f.__name__: f
    for f in (
        *(jvp, vmap, grad, vjp, jacrev, jacfwd, hessian, linearize),
        *(of_weights, assigned, forward_mode, cond, while_loop),
    )
}


class Layer(nn.Module):
    way = None

    def __init__(self, dim=6):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(dim), SwiGLU(dim, 10)

    def body(self, x):
        return x + self.mlp(self.norm(x))

    def forward(self, x):
        return torch.tanh(self.body(x) if self.way is None else self.way(x))


def sides(layers=3):
    """The same model unsharded, under FSDP2 and under this library."""
    torch.manual_seed(3)
    plain = nn.Sequential(*(Layer() for _ in range(layers)), nn.Linear(6, 2))
    for param in plain.parameters():
        nn.init.normal_(param, std=0.4)
    found = {"plain": plain} | {name: copy.deepcopy(plain) for name in ENGINES}
    for name, shard in ENGINES.items():
        for layer in found[name]:
            shard(layer)
        shard(found[name])
    return found


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model, number, call=None):
    """Run forward, backward and the optimizer step; returns the results."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).requires_grad_()
    out = model(x) if call is None else call(model, x)
    out.square().mean().backward()
    grads = [None if p.grad is None else full(p.grad).clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.zero_grad()
    return [out.detach(), x.grad, *grads]


def check(found, number, call=None):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides it
    warnings.filterwarnings("ignore", message="`torch.jit")  # raised by torch's own imports
    warnings.filterwarnings("ignore", message="Attempted to insert a get_attr Node")  # raised in func.linearize
    expected, *others = [step(model, number, call) for model in found.values()]
    assert all(g is None or g.isfinite().all() for g in expected)
    for other in others:
        torch.testing.assert_close(other, expected)


@pytest.mark.parametrize("name", [name if name in ("jvp", "assigned") else more(name) for name in WAYS])
@distributed(world=2)
def test_training_continues_after_a_forward_with_transforms(rank, world, name):
    torch._dynamo.reset()
    found = sides(layers=2)
    for number in range(5):
        for model in found.values():
            for layer in model[:-1]:
                layer.way = WAYS[name].__get__(layer) if number < 3 else None
        check(found, number)


AROUND = {
    "jvp": lambda model, x: sum(func.jvp(model, (x,), (torch.ones_like(x),))),
    "vmap": lambda model, x: func.vmap(model)(x),
    "grad": lambda model, x: model(x) + func.grad(lambda v: model(v).square().sum())(x)[:, :2],
    "vjp": lambda model, x: model(x) + func.vjp(model, x)[1](torch.ones(4, 2))[0][:, :2],
    "jacrev": lambda model, x: model(x) + func.jacrev(model)(x).sum((0, 1))[:, :2],
    "hessian": lambda model, x: model(x) + func.hessian(lambda v: model(v).square().sum())(x).sum((0, 1))[:, :2],
    "no hooks allowed": lambda model, x: without_hooks(model, x),
}


def without_hooks(model, x):
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return model(x)


FSDP2_FAILS = torch.__version__ < "2.13"  # within transforms: it frees storage that they have wrapped


@distributed(world=2)
def test_a_transform_around_a_sharded_model_is_correct_even_if_other_code_runs_before_its_use(rank, world):
    found = sides()
    if FSDP2_FAILS:
        del found["fsdp2"]
    x, outs = torch.randn(4, 6), {}
    for name, model in found.items():
        out, pull = func.vjp(model, x)
        for number in range(2):
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(number))).sum()
        outs[name] = [each.detach() for each in (out, *pull(torch.ones_like(out)))]
        del out, pull
    for other in outs:
        torch.testing.assert_close(outs[other], outs["plain"])
    for number in range(2):
        check(found, number)
    assert_at_rest(found["ours"])


@pytest.mark.parametrize(
    "name", [name if name in ("vmap", "grad", "no hooks allowed") else more(name) for name in AROUND]
)
@pytest.mark.parametrize("warm", [0, more(2)])
@distributed(world=2)
def test_a_transform_around_a_sharded_model_leaves_no_state_behind(rank, world, name, warm):
    found = sides()
    if name in ("grad", "vjp", "jacrev", "hessian") or (FSDP2_FAILS and name != "no hooks allowed"):
        del found["fsdp2"]  # the loss depends on a gradient, and FSDP2 has resharded weights that this backward reads
    for number in range(6):
        check(found, number, AROUND[name] if warm <= number < warm + 2 else None)


@distributed(world=2)
def test_weights_saved_by_a_transform_are_not_read_after_they_changed(rank, world):
    model = sides()["ours"]
    for number in range(3):
        for layer in model[:-1]:
            layer.way = vjp.__get__(layer)
        step(model, number)
    loss = model(torch.randn(4, 6)).mean()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    with pytest.raises((StaleStateError, RuntimeError), match=r"changed|modified"):
        loss.backward()


FOREIGN = """
import sys
import torch
import torch.distributed as dist

names = {{key: dict(vars(module)) for key, module in list(sys.modules.items()) if key.partition(".")[0] == "torch"}}
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)) if {compiled} else None
import composable_shard as cs

changed = [f"{{key}}.{{name}}" for key, before in names.items() for name, value in vars(sys.modules[key]).items()
           if callable(before.get(name)) and before[name] is not value]
assert not {compiled} or not [name for name in changed if "hooks" in name], changed
assert {compiled} or not changed, changed
if {sharded}:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = cs.fully_shard(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
slope = torch.compile(torch.func.grad(lambda x: x.sin().sum()), backend="eager", fullgraph=True)
torch.testing.assert_close(slope(torch.ones(3)), torch.ones(3).cos())
"""


@pytest.mark.matrix
@pytest.mark.parametrize("compiled", [pytest.param(True, id="compiled before"), more(False, id="not compiled before")])
@pytest.mark.parametrize("sharded", [pytest.param(True, id="a model is sharded"), more(False, id="only imported")])
def test_functions_with_transforms_compile_as_without_this_library(compiled, sharded):
    source = FOREIGN.format(compiled=compiled, sharded=sharded)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
