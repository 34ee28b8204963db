"""Parameters that are tensor subclasses with several parts: uses, copies and saves have the latest values."""

from __future__ import annotations

import contextlib
import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, fully_shard
from _pool import distributed
from _stepping import assert_at_rest

aten = torch.ops.aten
BY_PARTS = (aten.detach.default, aten.clone.default, aten.slice.Tensor, aten._to_copy.default)


class Parts(torch.Tensor):
    """A tensor made of the tensors `names`. Operations use its value, except those about memory."""

    names: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls, first, *rest):
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=torch.float32, device=first.device)

    def parts(self):
        return [getattr(self, name) for name in self.names]

    def settings(self):
        return ()

    def __tensor_flatten__(self):
        return list(self.names), self.settings()

    @classmethod
    def __tensor_unflatten__(cls, parts, settings, shape, stride):
        return cls(*parts.values(), *settings)

    @classmethod
    def of(cls, value):
        return cls(value)

    def like(self, parts):
        return type(self)(*parts, *self.settings())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        self, kwargs = args[0], kwargs or {}
        if func in BY_PARTS:
            return self.like([func(part, *args[1:], **kwargs) for part in self.parts()])
        if func is aten.split.Tensor:
            pieces = [func(part, *args[1:], **kwargs) for part in self.parts()]
            return [self.like(parts) for parts in zip(*pieces, strict=True)]
        if func in (aten.view.default, aten.as_strided.default):  # torch's FSDP2 calls these on padded tensors
            return self.like([part[: args[1][0]] if part.ndim and args[1][0] > 0 else part for part in self.parts()])
        if func is aten.new_zeros.default:
            return self.like([part.new_zeros((args[1][0], *part.shape[1:])) for part in self.parts()])
        if func in (aten.copy_.default, aten.add_.Tensor) and isinstance(self, Parts):
            now = args[1] if func is aten.copy_.default else func(self.value(), *args[1:], **kwargs)
            made = now if isinstance(now, Parts) else self.of(now)
            for part, other in zip(self.parts(), made.parts(), strict=True):
                part.copy_(other)
            return self
        args, kwargs = pytree.tree_map_only(Parts, lambda t: t.value(), (args, kwargs))
        return func(*args, **kwargs)


def padded(part, rows):
    return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])


class Quantized(Parts):
    """Eight bits and a scale for each row; it keeps its class when gathered."""

    names = "codes", "scale"

    def __init__(self, codes, scale):
        self.codes, self.scale, self.note = codes, scale, None

    @classmethod
    def of(cls, value):
        scale = value.abs().amax(1) / 127 + 1e-9
        return cls((value / scale[:, None]).round().to(torch.int8), scale)

    def value(self):
        return self.codes * self.scale[:, None]

    @functools.cached_property
    def dense(self):
        return self.value()

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = -(-outer_size[0] // mesh.size())
        return (padded(self.codes, rows), padded(self.scale, rows)), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (type(self)(*outputs), outputs)


class Master(Parts):
    """Stored in full precision and gathered in another form."""

    names = ("inner",)

    def __init__(self, inner):
        self.inner, self.scale = inner, None

    def value(self):
        return self.inner

    def scaled(self, mesh):
        """Return the scaled tensor to send, and the scale: the least power of two that bounds all ranks' elements."""
        most = self.inner.abs().max() if self.inner.numel() else torch.zeros(())
        dist.all_reduce(most, dist.ReduceOp.MAX, mesh.get_group())
        scale = 2.0 ** most.log2().ceil()
        return self.inner / scale, scale


def local(out):
    return out.to_local() if isinstance(out, DTensor) else out


class Scaled(Master):
    """Gathered as another class, whose scale is a new tensor in each gather."""

    class Whole(Parts):
        names = "inner", "scale"

        def __init__(self, inner, scale):
            self.inner, self.scale = inner, scale

        def value(self):
            return self.inner * self.scale

        def like(self, parts):
            return type(self)(parts[0], self.scale)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        inner, scale = self.scaled(mesh)
        return (padded(inner, -(-outer_size[0] // mesh.size())),), (scale,)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            local(out).scale = metadata[0]
            return None
        return self.Whole(outputs[0], metadata[0]), outputs


class Counted(Master):
    """The same with a Python number as scale, which is one of its settings."""

    class Whole(Parts):
        names = ("inner",)

        def __init__(self, inner, factor):
            self.inner, self.factor = inner, factor

        def settings(self):
            return (self.factor,)

        def value(self):
            return self.inner * self.factor

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        inner, scale = self.scaled(mesh)
        return (padded(inner, -(-outer_size[0] // mesh.size())),), float(scale)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            local(out).factor = metadata
            return None
        return self.Whole(outputs[0], metadata), outputs


class Renewed(Counted):
    """Gathered into one tensor and computed into another one, which is new in each gather."""

    class Whole(Parts):
        names = ("inner",)

        def __init__(self, inner):
            self.inner = inner

        def value(self):
            return self.inner

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        whole = outputs[0] * metadata
        if out is not None:
            local(out).inner = whole[: local(out).shape[0]]
            return None
        return self.Whole(whole), ()


KINDS = [Quantized, Scaled, Counted, Renewed]


def linears(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def made(kind, frozen=False, **options):
    torch.manual_seed(3)
    model = Transformer(vocabulary=38, layers=2, **options)
    for linear in linears(model):
        linear.weight = nn.Parameter(kind.of(linear.weight.detach()), requires_grad=not frozen)
        linear.weight.decay = 0.25
    return model


def shard(model, engine, **options):
    for block in model.blocks:
        engine(block, **options)
    engine(model, **options)
    return model


def models_of(kind, reshard=True, fsdp2=True, **options):
    models = {"plain": made(kind, **options)}
    for name, engine in ENGINES.items():
        if fsdp2 or name == "ours":
            models[name] = shard(made(kind, **options), engine, reshard_after_forward=reshard)
    return models


def sgd(models):
    return [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.3) for m in models.values()]


def value(tensor):
    tensor = tensor.detach()
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.value() if isinstance(tensor, Parts) else tensor


def assert_same_weights(models):
    for model in models.values():
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    plain, ours = models["plain"], models["ours"]
    for name, param in plain.named_parameters():
        mine = value(ours.get_parameter(name))
        if "fsdp2" in models:
            assert torch.equal(mine, value(models["fsdp2"].get_parameter(name))), name
        rows = -(-len(param) // 2) * dist.get_rank()
        torch.testing.assert_close(mine, value(param)[rows : rows + len(mine)], rtol=1e-4, atol=1e-5)


def assert_same_losses(losses):
    torch.testing.assert_close(losses["ours"], losses["plain"])
    assert torch.equal(losses["ours"], losses.get("fsdp2", losses["ours"]))


def train(models, between=None, micro=1, **calls):
    """Train all models with equal data on all ranks; compare `between(model)` after each step."""
    optimizers = sgd(models)
    for step in range(3):
        losses = {}
        for name, model in models.items():
            for at in range(micro):
                if name != "plain":
                    for call, per_micro in calls.items():
                        getattr(model, call)(per_micro[at])
                losses[name] = next_token_loss(model, *token_batch(0, 10 * at + step))
                losses[name].backward()
            losses[name] = losses[name].detach()
        assert_same_losses(losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if between is not None:
            assert_same_losses({name: between(model) for name, model in models.items()})
    assert_same_weights(models)
    assert_at_rest(models["ours"])


@torch.no_grad()
def evaluated(model):
    return next_token_loss(model, *token_batch(0, 77))


@pytest.mark.parametrize(("reshard", "hidden"), [(True, 24), (False, 25)])
@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_each_step_uses_the_parameters_of_the_step_before(rank, world, kind, reshard, hidden):
    refused = kind is Quantized and hidden % 2  # FSDP2 requires every input padded to the shape of the weight
    train(models_of(kind, reshard, fsdp2=not refused, hidden=hidden), evaluated)


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_inference_mode_and_unshard_show_the_parameters_of_the_last_step(rank, world, kind):
    def between(model):
        with torch.inference_mode():
            loss = next_token_loss(model, *token_batch(0, 77))
        block = model.blocks[1]
        if hasattr(block, "unshard"):
            block.unshard()
        weight = block.feed_forward.up.weight
        assert not isinstance(weight, DTensor)
        found = loss.clone() + value(weight).sum()
        if hasattr(block, "reshard"):
            block.reshard()
        return found

    train(models_of(kind, fsdp2=False), between)  # FSDP2 fails in inference_mode


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_accumulation_without_resharding_between_microbatches_is_exact(rank, world, kind):
    flags = {"set_requires_gradient_sync": (False, True), "set_reshard_after_backward": (False, True)}
    train(models_of(kind), evaluated, micro=2, **flags)


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_a_checkpoint_within_a_block_recomputes_from_parameters_gathered_in_backward(rank, world, kind):
    models = models_of(kind)
    for model in models.values():
        for block in model.blocks:
            forward = block.feed_forward.forward
            block.feed_forward.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    train(models, evaluated)


@distributed(world=2)
def test_attributes_that_users_set_are_copied_but_those_of_the_class_are_not(rank, world):
    for kind in KINDS:
        model = made(kind)
        linear = model.blocks[0].attention.q
        if kind is Quantized:
            assert linear.weight.dense is not None
        shard(model, fully_shard)
        weight = linear.weight
        assert weight.decay == 0.25
        assert not [v for v in weight.__dict__.values() if isinstance(v, torch.Tensor)], "an attribute is unsharded"
        assert weight.__dict__.keys().isdisjoint({"codes", "scale", "note", "inner", "dense"})
        # Unsharded parameters get both attributes, except that `scale` must not replace an inner tensor.
        weight.scale = weight.decay = "a user's value"
        seen = []

        def note(module, args, seen=seen):
            seen.append(module.weight)

        linear.register_forward_pre_hook(note)
        for context in (contextlib.nullcontext, torch.no_grad):
            with context():
                next_token_loss(model, *token_batch(0, 0))
        model.blocks[0].unshard()
        for shown in (*seen, linear.weight):
            assert isinstance(shown, nn.Parameter)
            assert shown.decay == "a user's value"
            assert not isinstance(getattr(shown, "scale", None), str) or "scale" not in kind.__dict__
        model.blocks[0].reshard()


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_copies_and_state_dicts_have_the_current_parameters(rank, world, kind):
    models = models_of(kind, fsdp2=False, hidden=25)
    train(models)
    ours = models["ours"]
    copied = copy.deepcopy(ours)
    assigned = shard(made(kind, hidden=25), fully_shard)
    loaded = shard(made(kind, hidden=25), fully_shard)
    evaluated(loaded)
    file = io.BytesIO()
    weight = ours.blocks[0].feed_forward.down.weight
    torch.save(weight.to_local(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).value(), value(weight))
    loaded.load_state_dict(ours.state_dict())
    assigned.load_state_dict({k: v.detach().clone() for k, v in ours.state_dict().items()}, assign=True)
    for each in (copied, loaded, assigned):
        assert torch.equal(evaluated(each), evaluated(ours))
        train({"plain": copy.deepcopy(models["plain"]), "ours": each}, evaluated)
    assert copied.blocks[0].attention.q.weight.decay == 0.25


@distributed(world=2)
def test_a_saved_parameter_holds_only_this_ranks_shard(rank, world):
    model = shard(made(Quantized), fully_shard)
    weight = model.blocks[0].feed_forward.down.weight
    assert pytree.tree_all_only(torch.Tensor, lambda t: t.numel() <= weight.numel() // 2, weight.__dict__)
    for part in weight.to_local().parts():
        assert part.untyped_storage().nbytes() == part.numel() * part.itemsize


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=2)
def test_frozen_parameters_next_to_trained_ones_are_exact(rank, world, kind):
    """Adapters have such models."""
    train(models_of(kind, frozen=True), evaluated)
