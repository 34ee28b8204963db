"""Various modules, each compared with the unsharded model and, if it supports them, with torch's FSDP2."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import composable_shard
from _engines import fully_shard
from _pool import distributed, more
from _sides import models_of, noise, optimizers_of, shard_children, train_alike
from _stepping import shard_whole

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
def test_recurrent_modules_use_the_current_flat_weights(rank, world, kind, shard):
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
def test_a_recurrent_cell_is_exact(rank, world):
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
    """Train, then evaluate in eval mode, where torch uses its fast path, then train again."""
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


@pytest.mark.parametrize(
    ("shard", "masked"),
    [
        (shard_layers, False),
        (shard_whole, True),
        (shard_attention_apart, False),
        more(shard_layers, True),
        more(shard_whole, False),
        more(shard_attention_apart, True),
    ],
)
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
def test_embeddings_with_max_norm_are_refused_by_name(rank, world, kind, shard):
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
    model.embed.weight.requires_grad_(False)  # then there is no gradient
    fully_shard(model)


@pytest.mark.parametrize("kept", [False, True])
@distributed(world=(1, 2))
def test_the_error_for_an_unexpected_sparse_gradient_names_the_parameter(rank, world, kept):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(11, 6))

        def forward(self, tokens):
            return F.embedding(tokens, self.table, sparse=True)

    models = models_of(Own, shard_whole)
    tokens = torch.zeros(2, dtype=torch.int64)
    models["ours"].set_requires_gradient_sync(not kept)
    with pytest.raises(composable_shard.errors.ShardConfigStateError, match=r"parameter table: .*sparse"):
        models["ours"](tokens).sum().backward()


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


# ---- modules that inspect their parameters


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
def test_unsharded_parameters_look_like_the_original_ones_in_forward(rank, world):
    models = models_of(lambda: nn.Sequential(Curious(), nn.Tanh(), nn.Linear(6, 2)))
    train_alike(models, lambda model, step: model(noise(3, 4)).square().mean())
    with torch.no_grad():
        for model in models.values():
            model(noise(3, 4))
    seen = {name: model[0].seen for name, model in models.items()}
    assert seen["ours"] == seen["plain"]


class Caching(nn.Module):
    """Caches a value that it computes from its weight as an attribute of the weight, until the weight changes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        weight = self.weight
        if getattr(weight, "made_at", None) != weight._version:
            weight.doubled, weight.made_at, weight.itself = weight.detach() * 2, weight._version, weight
        return x @ (weight + weight.doubled)


@distributed(world=(1, 2))
def test_values_cached_on_a_weight_are_never_stale(rank, world):
    models = models_of(Caching, shard_whole, fsdp2=False)  # FSDP2 keeps using the first value
    train_alike(models, lambda model, step: model(noise(3, 4)).square().mean())
    copied = copy.deepcopy(models["ours"])
    assert torch.equal(copied.weight.full_tensor(), models["plain"].weight)
    state = weakref.ref(copied.weight)
    copied(noise(3, 4)).sum().backward()
    del copied
    gc.collect()
    assert state() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@distributed(world=(1, 2))
def test_an_unused_parameter_of_a_group_has_no_grad(rank, world, dtype):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Parameter(torch.randn(4, dtype=dtype))
            self.idle = nn.Parameter(torch.randn(4, dtype=dtype))

        def forward(self, x):
            return (self.used * x).abs()

    models = models_of(Half, shard_whole, fsdp2=False)
    train_alike(models, lambda model, step: model(noise(3, 4)).sum())
    assert models["ours"].idle.grad is None
