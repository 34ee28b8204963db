"""Stand-ins for TransformerEngine: weights that gather rows or columns by phase, and delayed weight gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils import _pytree as pytree

from _engines import ENGINES
from _pool import distributed
from _stepping import assert_at_rest
from composable_shard.errors import ShardConfigStateError

aten = torch.ops.aten
BLOCK, WIDTH = 4, 16
PARTS = ("rows", "row_scales", "columns", "column_scales")


def quantize(tensor):
    """Quantize blocks of a matrix of shape (n, m) along its rows.

    Returns:
        codes, (n, m) of uint8, and scales, (n, m / BLOCK) of float32.
    """
    blocks = tensor.unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2, keepdim=True).clamp(min=1e-12) / 448
    return (blocks / scales).to(torch.float8_e4m3fn).flatten(1).view(torch.uint8), scales.squeeze(2)


def dequantize(codes, scales):
    return (codes.view(torch.float8_e4m3fn).float().unflatten(1, (-1, BLOCK)) * scales.unsqueeze(2)).flatten(1)


def parts_of(tensor):
    rows, row_scales = quantize(tensor)
    columns, column_scales = quantize(tensor.t().contiguous())
    return {
        "rows": rows,
        "row_scales": row_scales,
        "columns": columns.t().contiguous(),
        "column_scales": column_scales.t().contiguous(),
    }


class Quantized(torch.Tensor):
    """A matrix in 8 bits: scaled along rows for the forward, and along columns for the backward."""

    @staticmethod
    def __new__(cls, shape, parts):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, shape, parts):
        self.__dict__ |= parts

    @classmethod
    def of(cls, tensor):
        return cls(tensor.shape, parts_of(tensor))

    @property
    def parts(self):
        return {name: self.__dict__[name] for name in PARTS}

    def whole(self):
        if self.rows is not None:
            return dequantize(self.rows, self.row_scales)
        return dequantize(self.columns.t(), self.column_scales.t()).t()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = args[0]
        if func is aten.view.default:  # FSDP2 keeps a flat view
            return cls(first.shape if -1 not in args[1] else (first.numel(),), first.parts)
        if func in UNCHANGED:  # FSDP2 calls these with the sizes of the tensor itself
            return cls(first.shape, first.parts)
        if func is aten.split.Tensor:
            sizes = {name: args[1] // (BLOCK if name == "column_scales" else 1) for name in PARTS}
            pieces = zip(*[first.parts[name].split(size) for name, size in sizes.items()], strict=True)
            return [cls(each[0].shape, dict(zip(PARTS, each, strict=True))) for each in pieces]
        copied = args[1] if func is aten.copy_.default else None  # without rounding again
        args, kwargs = pytree.tree_map_only(cls, cls.whole, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func in NEW:
            return cls.of(out) if out.dim() == 2 else out
        if func._schema.name.endswith("_"):  # in-place
            other = copied.parts if isinstance(copied, cls) else parts_of(args[0])
            for name, part in other.items():
                first.__dict__[name].copy_(part)  # FSDP2 holds other tensors with the same memory
            return first
        return out

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        group = module._get_fsdp_state()._fsdp_param_group
        rows, columns = (self.rows, self.row_scales), (self.columns, self.column_scales)
        if not group._reshard_after_forward:
            sent, has = (*rows, *columns), (True, True)
        elif group._training_state == TrainingState.PRE_BACKWARD:
            sent, has = columns, (False, True)
        else:
            sent, has = rows, (True, False)
        module.sent.append((group._training_state.name, sum(each.nbytes for each in sent)))
        return sent, has

    def fsdp_post_all_gather(self, outputs, has, param_dtype, *, out=None):
        has_rows, has_columns = has
        found = dict.fromkeys(PARTS)
        found |= zip(PARTS[:2], outputs[:2], strict=True) if has_rows else {}
        found |= zip(PARTS[2:], outputs[-2:], strict=True) if has_columns else {}
        if out is None:
            out = type(self)(outputs[0].shape, found)
        out.__dict__ |= found
        return out, outputs


class Flattened(Quantized):
    """The same, with the methods that torch.compile needs."""

    def __tensor_flatten__(self):
        return [name for name in PARTS if self.__dict__[name] is not None], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, shape, stride):
        return cls(shape, dict.fromkeys(PARTS) | parts)


UNCHANGED = {aten.detach.default, aten.as_strided.default, aten.slice.Tensor}
NEW = {aten.new_zeros.default, aten.empty_like.default, aten.clone.default, aten._to_copy.default}


class Product(torch.autograd.Function):
    """`x @ weight.T`, with the rows of a quantized weight in forward and its columns in backward."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ (dequantize(weight.rows, weight.row_scales) if isinstance(weight, Quantized) else weight).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        by_columns = isinstance(weight, Quantized)
        full = dequantize(weight.columns.t(), weight.column_scales.t()).t() if by_columns else weight
        if ctx.layer.delays:
            ctx.layer.store.append((x.detach(), grad))
            return grad @ full, None, None
        return grad @ full, grad.t() @ x, None


class Linear(nn.Module):
    """A layer with a weight of a class, or a plain one. With `delays`, `backward_dw` computes its gradient."""

    def __init__(self, kind, delays=False):
        super().__init__()
        data = torch.randn(WIDTH, WIDTH) / 4
        self.weight = nn.Parameter(data if kind is None else kind.of(data))
        self.norm = nn.RMSNorm(WIDTH)
        self.delays, self.store, self.sent = delays, [], []

    def forward(self, x):
        return x + Product.apply(self.norm(x), self.weight, self).tanh()

    def backward_dw(self):
        """Compute the oldest delayed gradient, and add it to `main_grad` if there is one, or else to `grad`."""
        x, grad = self.store.pop(0)
        found, weight = grad.t() @ x, self.weight
        if hasattr(weight, "main_grad"):
            weight.main_grad += found
        else:
            weight.grad = found if weight.grad is None else weight.grad + found


def models_of(kind, delays=False, **options):
    """The same model unsharded, with ours and with FSDP2."""
    models = {}
    for name in ("plain", *ENGINES):
        torch.manual_seed(0)
        models[name] = nn.Sequential(*(Linear(kind, delays) for _ in range(3)))
        if name != "plain":
            for layer in models[name]:
                ENGINES[name](layer, **options)
            ENGINES[name](models[name], **options)
    return models


def batch(step):
    """The same batch on all ranks, so that the mean of the gradients is exact."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def full(tensor):
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.whole() if isinstance(whole, Quantized) else whole


def shard_of(tensor):
    local = tensor.to_local()
    return local.whole() if isinstance(local, Quantized) else local


def assert_alike(models):
    """Check that gradients are bitwise identical, and then apply them."""
    plain = models["plain"]
    for name, param in plain.named_parameters():
        for side in ENGINES:
            grad = models[side].get_parameter(name).grad
            assert torch.equal(full(grad), param.grad), f"{side}: {name}"
    for model in models.values():
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad)
                param.grad = None


def assert_equal_shards(models):
    for mine, theirs in zip(*(models[side].parameters() for side in ENGINES), strict=True):
        assert torch.equal(shard_of(mine), shard_of(theirs))


@pytest.mark.parametrize("kind", [Quantized, Flattened])
@pytest.mark.parametrize("reshards", [True, False])
@distributed(world=2)
def test_weights_send_their_rows_in_forward_and_their_columns_in_backward(rank, world, reshards, kind):
    models = models_of(kind, reshard_after_forward=reshards)
    for step in range(3):
        losses = {name: model(batch(step)).square().mean() for name, model in models.items()}
        for side, loss in losses.items():
            assert torch.equal(loss, losses["plain"]), side
            loss.backward()
        assert_alike(models)
        assert_equal_shards(models)
    assert_at_rest(models["ours"])
    codes, scales = WIDTH * WIDTH // world, WIDTH * WIDTH // BLOCK * 4 // world
    one_form = codes + scales
    for layer in (0, 2):
        by_side = {side: models[side][layer].sent for side in ENGINES}
        assert by_side["ours"] == by_side["fsdp2"]
        expected = [("FORWARD", one_form), ("PRE_BACKWARD", one_form)] if reshards else [("FORWARD", 2 * one_form)]
        assert by_side["ours"] == 3 * expected


def reduce_by_hand(model):
    """Reduce the gradients of unsharded parameters as torch's pipelining does after delayed weight gradients."""
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = model._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


@pytest.mark.parametrize("kind", [None, Quantized])
@distributed(world=2)
def test_delayed_weight_gradients_are_reduced(rank, world, kind):
    models = models_of(kind, delays=True, reshard_after_forward=False)
    for step in range(2):
        for name, model in models.items():
            if name != "plain":
                model.set_is_last_backward(False)
                model.set_reshard_after_backward(False)
                model.set_requires_gradient_sync(False)
            for number in range(2):
                model(batch(2 * step + number)).square().mean().backward()
            for layer in model:
                layer.backward_dw()
                layer.backward_dw()
            if name != "plain":
                reduce_by_hand(model)
        assert_alike(models)
        assert_equal_shards(models)
    assert_at_rest(models["ours"])


@distributed(world=2)
def test_an_optimizer_refuses_a_delayed_gradient_of_a_resharded_weight(rank, world):
    models = models_of(None, delays=True)
    for side in ENGINES:
        models[side](batch(0)).square().mean().backward()
        models[side][0].backward_dw()
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            torch.optim.SGD(models[side].parameters(), lr=0.1, foreach=False).step()


@distributed(world=2)
def test_a_gradient_that_was_assigned_and_not_reduced_is_an_error_in_the_next_backward(rank, world):
    model = models_of(None)["ours"]
    model.set_requires_gradient_sync(False)
    model(batch(0)).square().mean().backward()
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    model.set_requires_gradient_sync(True)
    loss = model(batch(0)).square().mean()
    with pytest.raises(ShardConfigStateError, match=r"0.weight: its .grad is a plain tensor .*post_backward\(\)"):
        loss.backward()
