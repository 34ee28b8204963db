"""Users' hooks on modules, parameters and gradients; unusual autograd graphs."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from contract._ways import REAL, common_fsdp, contract, layers


@contract()
def test_post_accumulate_hooks_see_the_reduced_gradient(t):
    plain, model = t.pair(layers)
    t.shard(model)
    seen = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, n=name: seen.setdefault(n, []).append(p.grad))
    for each in (plain, model):
        each(t.randn(2, 8)).sum().backward()
    t.average_grads(plain)
    for name, param in plain.named_parameters():
        (grad,) = seen[name]
        assert isinstance(grad, DTensor)
        t.same(grad, param.grad)


@contract()
def test_an_optimizer_may_step_in_post_accumulate_hooks(t):
    plain, model = t.pair(layers)
    t.shard(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    each = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def step(param):
        each[param].step()
        each[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for count in range(3):
        x = t.randn(2, 8, step=count)
        losses = [m(x).sum() for m in (plain, model)]
        t.same(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        t.average_grads(plain)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            t.same(a, b)


@contract()
def test_module_hooks_see_unsharded_parameters_and_run_once(t):
    model = t.build(layers)
    calls = []
    for place, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda m, a, i=place: calls.append((i, "pre", type(m[0].weight) is DTensor)))
    t.shard(model)
    for place, layer in enumerate(model):
        layer.register_forward_hook(lambda m, a, o, i=place: calls.append((i, "post", o.shape)))
    model(t.randn(2, 8)).sum().backward()
    assert [c for c in calls if c[1] == "pre"] == [(i, "pre", False) for i in range(3)]
    assert [c for c in calls if c[1] == "post"] == [(i, "post", (2, 8)) for i in range(3)]


@contract()
def test_full_backward_hooks_run_once_each_in_reverse_order(t):
    model = t.build(layers)
    t.shard(model)
    calls = []
    for place, layer in enumerate(model):
        layer.register_full_backward_hook(lambda m, gi, go, i=place: calls.append((i, go[0].shape)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP2 warns about the view of an output that such a hook makes
        model(t.randn(2, 8)).sum().backward()
    assert calls == [(i, (2, 8)) for i in (2, 1, 0)]


@contract()
def test_a_forward_hook_may_change_inputs_and_outputs(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for each in (plain, model):
        each[1].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        each[1].register_forward_hook(lambda m, args, out: out + 1)
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_an_unused_output_does_not_prevent_training(t):
    plain, model = t.pair(lambda: nn.ModuleList(common_fsdp().DoubleLinear(8) for _ in range(2)))
    for layer in model:
        t.fully_shard(layer, mesh=t.mesh())
    for used in (0, 1):
        for each in (plain, model):
            each.zero_grad()
            outs = each[0](t.randn(2, 8, step=used))
            each[1](outs[used])[used].sum().backward()
        t.average_grads(plain)
        t.same_params(model, plain)


@contract()
def test_a_module_whose_output_is_unused(t):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            self.unused(x)
            return self.used(x)

    plain, model = t.pair(Model)
    for child in model.children():
        t.fully_shard(child, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_activations_in_dataclasses_dicts_and_none(t):
    @dataclasses.dataclass
    class Out:
        x: torch.Tensor
        more: dict
        nothing: None = None

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, given):
            x = given.x if isinstance(given, Out) else given
            y = self.layer(x)
            return Out(y, {"twice": 2 * y, "list": [y.relu(), "words"]})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Inner(), Inner()

        def forward(self, x):
            out = self.second(self.first(x))
            return out.x + out.more["twice"] + out.more["list"][0]

    plain, model = t.pair(Model)
    for child in model.children():
        t.fully_shard(child, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_backward_through_one_part_of_the_graph_and_then_the_rest(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for each in (plain, model):
        x = t.randn(2, 8)
        first = each[0](x) if each is plain else each(x)
        first.sum().backward(retain_graph=True)
        first.sum().backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())


@contract()
def test_the_sum_of_the_losses_of_two_forwards(t):
    plain, model = t.pair(layers)
    t.shard(model)
    for each in (plain, model):
        total = sum(each(t.randn(2, 8, step=i)).square().mean() for i in range(3))
        total.backward()
    t.average_grads(plain)
    t.same_params(model, plain)


@contract(ways=REAL)
def test_a_gradient_scaler_trains_and_skips_a_step_that_overflows_on_one_rank(t):
    plain, model = t.pair(layers)
    t.shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1) for _ in range(2)]
    for step in range(3):
        for each, optimizer, scaler in zip((plain, model), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = each(t.randn(2, 8, step=step)).sum()
            if step == 1 and t.rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if each is plain:
                t.average_grads(plain)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            t.same(a, b)
        assert scalers[0].get_scale() == scalers[1].get_scale()


@contract()
def test_training_continues_after_an_exception_in_forward_and_a_reset(t):
    plain, model = t.pair(layers)
    t.shard(model)

    def fail(module, args):
        raise KeyError("for the test")

    model(t.randn(2, 8)).sum().backward()
    model.zero_grad()
    handle = model[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(t.randn(2, 8))
    handle.remove()
    model.reset_iter_state()
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_tensor_hooks_on_outputs_and_inputs(t):
    plain, model = t.pair(layers)
    t.shard(model)
    seen = []
    for each in (plain, model):
        x = t.randn(2, 8).requires_grad_()
        out = each(x)
        out.register_hook(lambda g: g * 3)
        x.register_hook(lambda g: seen.append(g))
        out.sum().backward()
    t.same(seen[1], seen[0])
    t.average_grads(plain)
    t.same_params(model, plain)


@contract()
def test_ranks_may_use_different_parameters_if_unused_ones_get_zeros(t):
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.choices = nn.ParameterList([torch.zeros(8, 8) for _ in range(2)])

        def forward(self, x, choice):
            return x @ self.choices[choice]

    plain, model = t.pair(Chooses)
    t.fully_shard(model, mesh=t.mesh())
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        return
    model.set_reduce_scatter_unused_params(True)
    for each in (plain, model):
        each(t.randn(2, 8), t.rank).sum().backward()
    for param in plain.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    t.average_grads(plain)
    t.same_params(model, plain)


@contract()
def test_training_continues_after_an_exception_in_backward_and_a_reset(t):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("for the test")

    plain, model = t.pair(layers)
    t.shard(model)
    handle = model[1].register_forward_hook(lambda m, a, out: Fails.apply(out))
    with pytest.raises(KeyError):
        model(t.randn(2, 8)).sum().backward()
    handle.remove()
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.zero_grad()
    t.train(plain, model, lambda step: t.randn(2, 8, step=step))


@contract()
def test_recurrent_layers(t):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.rnn(x)[0]).relu()

    plain, model = t.pair(Recurrent)
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 4, 8, step=step))


@contract()
def test_torchs_transformer_encoder_layer(t):
    make = lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)  # noqa: E731
    plain, model = t.pair(make)
    t.fully_shard(model, mesh=t.mesh())
    t.train(plain, model, lambda step: t.randn(2, 4, 8, step=step))


@contract()
def test_forward_hooks_with_kwargs_and_always_called(t):
    model = t.build(layers)
    calls = []
    model[0].register_forward_pre_hook(lambda m, args, kwargs: calls.append("pre") or (args, kwargs), with_kwargs=True)
    model[0].register_forward_hook(lambda m, args, kwargs, out: calls.append("post"), with_kwargs=True)
    model[1].register_forward_hook(lambda m, args, out: calls.append("always"), always_call=True)
    t.shard(model)
    model(t.randn(2, 8)).sum().backward()
    assert calls == ["pre", "post", "always"]


@contract()
def test_a_hook_on_a_parameter_sees_its_reduced_gradient(t):
    plain, model = t.pair(layers)
    for layer in model:
        t.fully_shard(layer, mesh=t.mesh())
    t.fully_shard(model, mesh=t.mesh())
    seen = []
    model[0][0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        for each in (plain, model):
            each(t.randn(2, 8, step=micro)).sum().backward()
    t.average_grads(plain)
    t.same_params(model, plain)
    assert len(seen) == 1
