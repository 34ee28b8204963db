"""Particular modules and uses, each beside the unsharded model and, where it can do them, torch's FSDP2.

All ranks are fed alike, so that the mean of their gradients is the gradient of the unsharded model, to the bit.
"""

from __future__ import annotations

import copy
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from _engines import ENGINES, fully_shard, mesh_of
from _pool import distributed
from _stepping import assert_at_rest, pool_of, shard_whole
from composable_shard import clip_grad_norm_


def shard_children(model, engine, **options):
    """Each child a group of its own, and the root."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            engine(child, **options)
    engine(model, **options)


def models_of(make, shard=shard_children, fsdp2=True, **options):
    """The same model unsharded, under ours and, if it can, under FSDP2."""
    # what FSDP2 says of modules whose output is a view, and torch of its own fast path
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
    found = {}
    for name in ("plain", *ENGINES) if fsdp2 else ("plain", "ours"):
        torch.manual_seed(3)
        found[name] = make()
        if name != "plain":
            shard(found[name], ENGINES[name], **options)
    return found


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_alike(models, exact=True):
    """Parameters, gradients and buffers of each are those of the unsharded model; ours to the bit."""
    plain = models["plain"]
    for engine, model in models.items():
        tolerance = {"rtol": 0, "atol": 0} if exact and engine == "ours" else {}
        check = partial(torch.testing.assert_close, **tolerance)
        for name, param in plain.named_parameters():
            other = model.get_parameter(name)
            where = f"{engine}: {name}"
            check(whole(other.detach()), param.detach(), msg=lambda m, w=where: f"{w}: {m}")
            assert (other.grad is None) == (param.grad is None), where
            if param.grad is not None:
                check(whole(other.grad), param.grad, msg=lambda m, w=where: f"gradient of {w}: {m}")
        for name, buffer in plain.named_buffers():
            check(model.get_buffer(name), buffer)


def optimizers_of(models):
    found = {name: [p for p in model.parameters() if p.requires_grad] for name, model in models.items()}
    return {name: torch.optim.SGD(params, lr=0.1) for name, params in found.items()}


def train_alike(models, loss_of, steps=3, optimizers=None, exact=True, at_rest=True):
    """Steps of all of them, compared each time."""
    optimizers = optimizers or optimizers_of(models)
    for step in range(steps):
        losses = {}
        for name, model in models.items():
            torch.manual_seed(step)
            losses[name] = loss_of(model, step)
            losses[name].backward()
            losses[name] = losses[name].detach()
        for name, loss in losses.items():
            torch.testing.assert_close(loss, losses["plain"], msg=lambda m, n=name: f"loss of {n}: {m}")
        assert_alike(models, exact)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(models, exact)
    if at_rest:
        assert_at_rest(models["ours"])


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- recurrent modules


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(4, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_recurrent_modules_find_their_flat_weights(rank, world, kind, shard):
    models = models_of(partial(Recurrent, kind), shard)
    x = noise(2, 5, 4)
    train_alike(models, lambda model, step: model(x).square().mean(), 2)
    for model in models.values():
        model.rnn.flatten_parameters()
        model.eval()
    with torch.no_grad():
        outs = {name: model(x) for name, model in models.items()}
    assert torch.equal(outs["ours"], outs["plain"])
    assert torch.equal(outs["fsdp2"], outs["plain"])
    assert all(isinstance(w, DTensor) for w in models["ours"].rnn._flat_weights)
    made = copy.deepcopy(models["ours"])
    with torch.no_grad():
        assert torch.equal(made(x), outs["plain"])
    assert {id(w) for w in made.rnn._flat_weights}.isdisjoint(map(id, models["ours"].rnn._flat_weights))


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 6)

    def forward(self, x):
        h = c = torch.zeros(x.shape[0], 6)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return h


@distributed(world=2)
def test_a_cell_that_is_used_at_every_step_of_a_sequence_is_exact(rank, world):
    models = models_of(Cells, shard_whole)
    train_alike(models, lambda model, step: model(noise(2, 5, 4, seed=step)).square().mean())


# ---- attention


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.att = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.inp(x)
        return self.att(x, x, x, need_weights=not self.training)[0]


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)


def shard_layers(model, engine, **options):
    for layer in model.layers:
        engine(layer, **options)
    engine(model, **options)


def shard_attention_apart(model, engine, **options):
    for layer in model.layers:
        engine(layer.self_attn, **options)
    shard_layers(model, engine, **options)


def train_and_evaluate(models, *args, **kwargs):
    """Steps, then eval mode, where torch takes its fast path."""
    loss = lambda model, step: model(*args, **kwargs).square().mean()  # noqa: E731
    optimizers = optimizers_of(models)
    train_alike(models, loss, 2, optimizers)
    for model in models.values():
        model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        outs = {}
        for name, model in models.items():
            with mode():
                outs[name] = model(*args, **kwargs).detach()
        for name, out in outs.items():
            torch.testing.assert_close(out, outs["plain"], msg=lambda m, n=name: f"{n} in eval mode: {m}")
    for model in models.values():
        model.train()
    train_alike(models, loss, 1, optimizers)


@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_attention_trains_and_evaluates(rank, world, shard):
    train_and_evaluate(models_of(Attention, shard), noise(2, 5, 4))


@pytest.mark.parametrize("shard", [shard_layers, shard_whole, shard_attention_apart])
@pytest.mark.parametrize("masked", [False, True])
@distributed(world=2)
def test_an_encoder_trains_and_evaluates(rank, world, shard, masked):
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    train_and_evaluate(models_of(encoder, shard), noise(2, 5, 8), src_key_padding_mask=mask)


# ---- embeddings


class Embedded(nn.Module):
    def __init__(self, kind=nn.Embedding, **options):
        super().__init__()
        self.embed = kind(11, 6, **options)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@distributed(world=2)
def test_embeddings_are_exact(rank, world, kind):
    models = models_of(partial(Embedded, kind, padding_idx=2, scale_grad_by_freq=True))
    tokens = torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(1))
    train_alike(models, lambda model, step: model(tokens).square().mean())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_embeddings_that_write_their_weight_in_forward_are_refused_by_name(rank, world, kind, shard):
    model = Embedded(kind, max_norm=1.0)
    fqn = "weight" if shard is shard_children else r"embed\.weight"
    with pytest.raises(ValueError, match=rf"parameter {fqn}: .*max_norm"):
        shard(model, fully_shard)
    shard(model, partial(fully_shard, ignored_params={model.embed.weight}))
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@distributed(world=2)
def test_sparse_gradients_are_refused_by_name(rank, world, kind):
    model = Embedded(kind, sparse=True)
    with pytest.raises(ValueError, match=r"parameter embed\.weight: .*sparse"):
        fully_shard(model)
    model.embed.weight.requires_grad_(False)  # then there is none
    fully_shard(model)


@distributed(world=2)
def test_a_sparse_gradient_that_comes_unforeseen_is_named(rank, world):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(11, 6))

        def forward(self, tokens):
            return F.embedding(tokens, self.table, sparse=True)

    models = models_of(Own, shard_whole)
    tokens = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"parameter table: .*sparse"):
        models["ours"](tokens).sum().backward()


# ---- parametrizations


def parametrized(register):
    def make():
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        for at in (0, 2):
            register(model[at])
        return model

    return make


def own_parametrization(linear):
    parametrize.register_parametrization(linear, "bias", nn.Softplus())


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


@pytest.mark.parametrize(
    "register",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        own_parametrization,
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "own"],
)
@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_parametrized_weights_are_exact(rank, world, register, shard):
    models = models_of(parametrized(register), shard)
    x = noise(5, 4)

    def loss_of(model, step):
        return model(x).square().mean()

    optimizers = optimizers_of(models)
    train_alike(models, loss_of, 2, optimizers)
    for model in models.values():
        model.eval()
    with torch.no_grad(), parametrize.cached():
        outs = [model(x) for model in models.values()]
    assert all(torch.equal(out, outs[0]) for out in outs)
    for model in models.values():
        model.train()
    with parametrize.cached():
        train_alike(models, loss_of, 1, optimizers)


@distributed(world=2)
def test_a_parametrization_that_comes_after_sharding_is_named(rank, world):
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    with pytest.raises(RuntimeError, match=r"0\.(weight|parametrizations)"):
        model(noise(2, 4))


# ---- buffers


@distributed(world=2)
def test_batch_norm_keeps_its_statistics_per_rank(rank, world):
    models = models_of(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
    for step in range(3):
        for model in models.values():
            model(noise(5, 4, seed=10 * step + rank)).square().mean().backward()
    for name, buffer in models["plain"].named_buffers():
        assert torch.equal(models["ours"].get_buffer(name), buffer), name
        assert torch.equal(models["fsdp2"].get_buffer(name), buffer), name
    for mine, theirs in zip(models["ours"].parameters(), models["fsdp2"].parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local(), theirs.grad.to_local())


# ---- modules that look at their parameters


class Curious(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=dtype))
        self.weight.tag = "mine"
        self.bias = nn.Parameter(torch.randn(6, dtype=dtype), requires_grad=False)
        self.seen = []

    def forward(self, x):
        weight, bias = self.weight, self.bias
        same = weight is self.weight and weight is self._parameters["weight"]
        assert weight.data_ptr() == weight[0].data_ptr() != 0
        assert weight.untyped_storage().data_ptr() != 0
        assert not isinstance(weight, DTensor)
        self.seen.append(
            (
                [(n, tuple(p.shape), p.dtype, p.stride(), p.is_contiguous()) for n, p in self.named_parameters()],
                [isinstance(p, nn.Parameter) for p in self.parameters()],
                [p.requires_grad for p in self.parameters()],
                sum(p.numel() for p in self.parameters()),
                weight.device,
                getattr(weight, "tag", None),
                same,
            )
        )
        return F.linear(x.to(weight.dtype), weight, bias)


@distributed(world=2)
def test_forward_sees_parameters_that_look_like_the_whole_ones(rank, world):
    models = models_of(lambda: nn.Sequential(Curious(), nn.Tanh(), nn.Linear(6, 2)))
    train_alike(models, lambda model, step: model(noise(3, 4)).square().mean())
    with torch.no_grad():
        for model in models.values():
            model(noise(3, 4))
    seen = {name: model[0].seen for name, model in models.items()}
    assert seen["ours"] == seen["plain"]


# ---- functional transforms


class Transformed(nn.Module):
    """Uses a transform in its forward, over its own weights and over a child's."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inp = nn.Linear(4, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return getattr(self, self.kind)(self.inp(x))

    def vmap(self, x):
        return torch.func.vmap(lambda row: torch.tanh(self.weight @ row))(x)

    def grad(self, x):
        return torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.weight @ row).sum()))(x)

    def jvp(self, x):
        return torch.func.jvp(lambda y: torch.tanh(y @ self.weight), (x,), (torch.ones_like(x),))[1]

    def functional_call(self, x):
        changed = {name: 2 * p for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, changed, (x,))


def shard_parts(model, engine, **options):
    engine(model.inp, **options)
    engine(model, **options)


@distributed(world=2)
def test_functional_calls_in_a_forward_are_exact(rank, world):
    models = models_of(partial(Transformed, "functional_call"), shard_parts)
    models["plain"].weight.requires_grad_(True)
    train_alike(models, lambda model, step: model(noise(3, 4)).square().mean())


@pytest.mark.parametrize("kind", ["vmap", "jvp"])
@distributed(world=2)
def test_functional_transforms_in_a_forward(rank, world, kind):
    models = models_of(partial(Transformed, kind), shard_parts)
    train_alike(models, lambda model, step: model(noise(3, 4)).square().mean())


@distributed(world=2)
def test_transforms_that_take_no_hooks_say_what_to_set_and_then_work(rank, world):
    models = models_of(partial(Transformed, "grad"), shard_parts)
    optimizers = optimizers_of(models)
    with pytest.raises(RuntimeError, match=r"uses one, that needs .* call set_keep_unsharded_storage\(True\)"):
        models["ours"](noise(3, 4))
    models["ours"].set_keep_unsharded_storage(True)
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean(), 3, optimizers, at_rest=False)


# ---- selective checkpoints, and others who keep views of weights past the hooks


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def body(self, x):
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return checkpointed(self.body, x)


def checkpointed(function, x):
    """With a policy that saves all, views of weights among them."""
    contexts = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.transposed = weight.t()
        ctx.save_for_backward(x)
        return x @ ctx.transposed

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.transposed.t(), grad.t() @ ctx.saved_tensors[0]


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.tanh(KeepsOnContext.apply(x, self.weight))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(checkpointed(block, x))
        return x


KEEPERS = {
    "selective checkpoint within": lambda: nn.Sequential(*[Checkpointed() for _ in range(3)]),
    "selective checkpoint around": Around,
    "autograd function": lambda: nn.Sequential(*[Keeper() for _ in range(3)]),
}


@pytest.mark.parametrize("kind", KEEPERS)
@distributed(world=2)
def test_views_of_weights_that_are_kept_past_the_hooks_stay_true(rank, world, kind):
    def shard_all(model, engine):
        for block in getattr(model, "blocks", model):
            engine(block, reshard_after_forward=True)
        engine(model)

    models = models_of(KEEPERS[kind], shard_all)
    optimizers = optimizers_of(models)
    for step in range(3):
        for name, model in models.items():
            loss = model(noise(3, 6, seed=step)).square().mean()
            if name == "ours":  # whatever the pool would give to others is overwritten
                others = [pool_of(model).lease(size) for size, free in pool_of(model)._free.items() for _ in free]
                for slot in others:
                    slot.typed(torch.uint8, written=True).fill_(255)
            loss.backward()
            if name == "ours":
                for slot in others:
                    pool_of(model).release(slot)
        assert_alike(models)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    del loss, model
    for _ in range(100):  # a thread of gloo has a copy of this thread's state, with the checkpoint, for a millisecond
        with torch.no_grad():
            models["ours"](noise(3, 6))
        live = torch.tensor([pool_of(models["ours"]).live_bytes])
        dist.all_reduce(live)
        if live.item() == 0:
            break
        time.sleep(0.02)
    assert live.item() == 0, "memory is still reserved when the graph is gone"


# ---- frozen and mixed


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).to(torch.bfloat16).requires_grad_(False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return x + self.base(x.to(torch.bfloat16)).float() + self.b(self.a(x))


@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_low_rank_adapters_train_on_a_frozen_base_of_another_dtype(rank, world, shard):
    models = models_of(lambda: nn.Sequential(LowRank(), LowRank()), shard)
    train_alike(models, lambda model, step: model(noise(3, 6, seed=step)).square().mean())


class Quantized(nn.Module):
    """A frozen weight of bytes with a scale, in the manner of quantized linear layers, and a trained bias."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randint(0, 256, (7, 6), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(7, 1), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x):
        assert self.codes.dtype == torch.uint8
        return F.linear(x, (self.codes.to(x.dtype) - 128) / 128 * self.scale, self.bias)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@distributed(world=2)
def test_quantized_weights_are_gathered_as_they_are(rank, world, param_dtype):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    models = models_of(lambda: nn.Sequential(nn.Linear(4, 6), Quantized()), mp_policy=policy)

    def loss_of(model, step):
        return model(noise(3, 4, seed=step)).float().square().mean()

    if param_dtype is None:
        train_alike(models, loss_of)
        return
    losses = [loss_of(models[name], 0) for name in ENGINES]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for mine, theirs in zip(models["ours"].parameters(), models["fsdp2"].parameters(), strict=True):
        assert mine.dtype == theirs.dtype
        if mine.requires_grad:
            assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


# ---- experts


class Experts(nn.Module):
    """Each row goes to one of four experts."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, route):
        x = self.inp(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = route == number
            if rows.any():
                out[rows] = expert(x[rows])
        return out


@pytest.mark.parametrize("zeros", [False, True])
@distributed(world=2)
def test_experts_in_one_group_may_be_unused_on_some_ranks_and_steps(rank, world, zeros):
    models = models_of(Experts, shard_whole, fsdp2=False)
    models["ours"].set_reduce_scatter_unused_params(zeros)
    optimizers = optimizers_of(models)
    routes = [[[0, 1, 1], [2, 2, 1]], [[3, 3, 3], [3, 3, 3]], [[0, 0, 0], [1, 1, 1]]]  # step, rank, row
    for step, route in enumerate(routes):
        batches = [(noise(3, 4, seed=10 * step + r), torch.tensor(route[r])) for r in range(world)]
        models["ours"](*batches[rank]).square().mean().backward()
        (sum(models["plain"](*batch).square().mean() for batch in batches) / world).backward()
        for number, expert in enumerate(models["plain"].experts):
            used = any(number in row for row in route)
            mine = models["ours"].experts[number].weight.grad
            assert (mine is not None) is (used or zeros)
            if mine is not None and not used:
                assert not mine.full_tensor().any()
                expert.weight.grad, expert.bias.grad = torch.zeros_like(expert.weight), torch.zeros_like(expert.bias)
        for name, param in models["plain"].named_parameters():
            if param.grad is not None:
                torch.testing.assert_close(models["ours"].get_parameter(name).grad.full_tensor(), param.grad)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_at_rest(models["ours"])


# ---- two models


@pytest.mark.parametrize("optimizers", [1, 2])
@distributed(world=2)
def test_a_generator_and_a_discriminator_train_together(rank, world, optimizers):
    pairs = models_of(lambda: nn.ModuleDict({"g": stack(3, 4), "d": stack(4, 1)}), shard_pair)

    def parameters(*models):
        return [p for model in models for p in model.parameters()]

    steppers = {}
    for name, pair in pairs.items():
        parts = [pair["g"], pair["d"]]
        lists = [parameters(*parts)] if optimizers == 1 else [parameters(part) for part in parts]
        steppers[name] = [torch.optim.SGD(params, lr=0.1) for params in lists]
    for step in range(3):
        for name, pair in pairs.items():
            of_d = steppers[name][-1]
            fake = pair["g"](noise(5, 3, seed=step))
            (pair["d"](fake.detach()).mean() - pair["d"](noise(5, 4, seed=9 + step)).mean()).backward()
            if optimizers == 2:
                of_d.step()
                of_d.zero_grad()
            (-pair["d"](fake).mean()).backward()  # the discriminator has moved, the generator has not
        assert_alike(pairs)
        for each in (optimizer for name in pairs for optimizer in steppers[name]):
            each.step()
            each.zero_grad()


def stack(first, last):
    return nn.Sequential(nn.Linear(first, 6), nn.Tanh(), nn.Linear(6, last))


def shard_pair(pair, engine):
    for model in pair.values():
        shard_children(model, engine)


@distributed(world=2)
def test_a_student_learns_from_a_sharded_teacher(rank, world):
    def make():
        pair = nn.ModuleDict({"teacher": stack(3, 4), "student": stack(3, 4)})
        pair["teacher"].requires_grad_(False).eval()
        return pair

    pairs = models_of(make, shard_pair)
    optimizers = optimizers_of(pairs)
    for step in range(3):
        for mode in (torch.no_grad, torch.enable_grad):
            for pair in pairs.values():
                with mode():
                    wanted = pair["teacher"](noise(5, 3, seed=step))
                (pair["student"](noise(5, 3, seed=step)) - wanted).square().mean().backward()
        assert_alike(pairs)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


# ---- precision and optimizers


@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_autocast_is_exact(rank, world, shard):
    models = models_of(partial(stack, 4, 2), shard)

    def loss_of(model, step):
        with torch.autocast("cpu", torch.bfloat16):
            return model(noise(3, 4, seed=step)).float().square().mean()

    train_alike(models, loss_of)
    for name, model in models.items():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            models[name] = model(noise(3, 4))
    assert torch.equal(models["ours"], models["plain"])


@distributed(world=2)
def test_a_step_with_an_overflow_on_one_rank_is_skipped_on_all(rank, world):
    models = models_of(partial(stack, 4, 2))
    scalers = {name: torch.amp.GradScaler("cpu", init_scale=8.0) for name in models}
    optimizers = optimizers_of(models)
    for step in range(3):
        for name, model in models.items():
            loss = model(noise(3, 4, seed=step)).square().mean()
            if step == 1:  # both know of it in the plain model
                loss = loss * (torch.inf if rank == 1 or name == "plain" else 1.0)
            scalers[name].scale(loss).backward()
            scalers[name].unscale_(optimizers[name])
            if step != 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scalers[name].step(optimizers[name])
            scalers[name].update()
            optimizers[name].zero_grad()
        assert len({scaler.get_scale() for scaler in scalers.values()}) == 1
        assert_alike(models, exact=False)
    assert scalers["ours"].get_scale() == 4.0


@pytest.mark.parametrize("shard", [shard_children, shard_whole])
@distributed(world=2)
def test_an_optimizer_in_backward_steps_each_parameter_when_its_gradient_is_there(rank, world, shard):
    models = models_of(partial(stack, 4, 2), shard)
    steps = dict.fromkeys(models, 0)

    def install(name, model):
        for param in model.parameters():
            optimizer = torch.optim.AdamW([param], lr=0.01, foreach=False)

            def step(param, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()
                steps[name] += 1

            param.register_post_accumulate_grad_hook(step)

    for name, model in models.items():
        install(name, model)
    for step in range(3):
        for model in models.values():
            model(noise(3, 4, seed=step)).square().mean().backward()
        assert_alike(models, exact=False)
    assert set(steps.values()) == {12}


@distributed(world=2)
def test_tensor_hooks_change_the_reduced_gradient(rank, world):
    models = models_of(partial(stack, 4, 2), fsdp2=False)  # FSDP2 calls them with nothing
    for model in models.values():
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    train_alike(models, lambda model, step: model(noise(3, 4, seed=step)).square().mean())


# ---- sharded and plain parameters together


def shard_but_biases(model, engine):
    shard_children(model, engine, ignored_params={model[0].bias, model[2].bias})


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [None, True, False])
@distributed(world=2)
def test_ignored_parameters_are_clipped_and_stepped_with_the_sharded_ones(rank, world, kind, foreach):
    models = models_of(partial(stack, 4, 2), shard_but_biases)
    theirs = models.pop("fsdp2")
    optimizers = {name: OPTIMIZERS[kind](model.parameters()) for name, model in models.items()}
    for step in range(3):
        for name, model in models.items():
            model(noise(3, 4, seed=step)).square().mean().backward()
            norm = clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
            models[name].norm = whole(norm)
        torch.testing.assert_close(models["ours"].norm, models["plain"].norm)
        assert_alike(models, exact=False)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(models, exact=False)
    theirs(noise(3, 4)).square().mean().backward()
    with pytest.raises(RuntimeError, match="got mixed"):
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, foreach=foreach)
    if kind != "sgd":
        with pytest.raises(RuntimeError, match="got mixed"):
            OPTIMIZERS[kind](theirs.parameters()).step()


@distributed(world=4)
def test_parameters_on_several_meshes_are_clipped_and_stepped_together(rank, world):
    def shard(model, engine):
        engine(model[0], mesh=mesh_of(2, 2))
        engine(model[2], mesh=mesh_of(4))

    models = models_of(partial(stack, 4, 2), shard, fsdp2=False)
    optimizers = {name: OPTIMIZERS["adamw foreach"](model.parameters()) for name, model in models.items()}
    for step in range(2):
        norms = []
        for model in models.values():
            model(noise(3, 4, seed=step)).square().mean().backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1))
        torch.testing.assert_close(*norms)
        assert_alike(models, exact=False)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(models, exact=False)
