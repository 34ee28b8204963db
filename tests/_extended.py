"""Tensor subclasses that define their own all-gather."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils import _pytree as pytree

aten = torch.ops.aten
KEEP_CLASS = {
    *(aten.empty_like.default, aten.new_zeros.default, aten.slice.Tensor, aten.copy_.default, aten.view.default),
    *(aten.as_strided.default, aten._to_copy.default, aten.split.Tensor, aten.clone.default, aten.detach.default),
}


class Wrapping(torch.Tensor):
    """A tensor that wraps another one, which most operations unwrap."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, shape, stride):
        return cls(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if func in KEEP_CLASS else out


def padded(inner, mesh, rows):
    """This rank's rows, with rows of zeros up to those of the first rank."""
    out = inner.new_zeros(-(-rows // mesh.size()), *inner.shape[1:])
    out[: len(inner)] = inner
    return out


class Halved(Wrapping):
    """Gathered in bfloat16 and used in float32."""

    def fsdp_pre_all_gather(self, mesh):
        assert mesh.ndim == 1
        return (self.inner.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        assert metadata is None
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered)
            return None
        wide = gathered.to(param_dtype)
        return wide, (wide,)


class Same(Wrapping):
    """Gathered and used as it is."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (outputs[0], outputs)


class InTwo(Wrapping):
    """Signs and magnitudes that are gathered separately and used directly in the outputs' memory."""

    class Whole(torch.Tensor):
        @staticmethod
        def __new__(cls, sign, size, shape):
            return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=size.dtype, device=size.device)

        def __init__(self, sign, size, shape):
            self.sign_of, self.size_of = sign, size

        def __tensor_flatten__(self):
            return ["sign_of", "size_of"], None

        @classmethod
        def __tensor_unflatten__(cls, tensors, context, shape, stride):
            return cls(tensors["sign_of"], tensors["size_of"], shape)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is aten.detach.default:
                return cls(args[0].sign_of, args[0].size_of, args[0].shape)
            if func is aten.as_strided.default:
                rows = args[1][0]
                return cls(args[0].sign_of[:rows], args[0].size_of[:rows], args[1])
            args, kwargs = pytree.tree_map_only(cls, cls.product, (args, kwargs or {}))
            return func(*args, **kwargs)

        def product(self):
            return self.sign_of.to(self.size_of.dtype) * self.size_of

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(module, torch.nn.Linear)
        assert tuple(outer_size) == (module.out_features, module.in_features)
        assert outer_stride == (module.in_features, 1)
        full = padded(self.inner, mesh, outer_size[0])
        return (full.sign().to(torch.int8), full.abs()), tuple(outer_size)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        sign, size = outputs
        if out is not None:
            whole = out.to_local() if isinstance(out, DTensor) else out
            assert whole.size_of.untyped_storage().data_ptr() == size.untyped_storage().data_ptr()
            return None
        return InTwo.Whole(sign, size, size.shape), ()


class Whole(torch.Tensor):
    """Codes of 8 bits and their scale. Operations see the product."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scale, dtype):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, shape, stride):
        return cls(tensors["codes"], tensors["scale"], context)

    def __repr__(self):  # torch 2.11 prints what it traces
        return f"Whole({tuple(self.shape)})"

    def product(self):
        return (self.codes.to(torch.float32) / self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].dtype)
        if func is aten.as_strided.default:
            return cls(args[0].codes[: args[1][0]], args[0].scale, args[0].dtype)
        args, kwargs = pytree.tree_map_only(cls, cls.product, (args, kwargs or {}))
        return func(*args, **kwargs)


class Scaled(Wrapping):
    """Gathered in float8 with one scale of all ranks, like torchao's float8 weights.

    The scale is computed by an all-reduce before the gather, or by `precompute_scales` for all weights.
    """

    def __init__(self, inner, scale=None):
        super().__init__(inner)
        self.scale = scale

    def __tensor_flatten__(self):
        tensors = ["inner"]
        if self.scale:  # as torchao writes it: a graph cannot do this
            tensors.append("scale")
        return tensors, None

    @staticmethod
    def scale_of(largest):
        return 448.0 / largest.to(torch.float32).clamp(min=1e-12)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        scale = self.scale
        if scale is None:
            largest = self.inner.abs().max() if self.inner.numel() else self.inner.new_zeros(())
            scale = self.scale_of(funcol.all_reduce(largest, "max", mesh))
        codes = (padded(self.inner, mesh, outer_size[0]) * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (codes,), (scale,)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (codes,), (scale,) = outputs, metadata
        if out is not None:
            (out.to_local() if isinstance(out, DTensor) else out).scale = scale
            return None
        return Whole(codes, scale, param_dtype), (codes,)


@torch.no_grad()
def precompute_scales(model):
    """Compute the scales of all `Scaled` weights with one all-reduce."""
    weights = [each._local_tensor for each in model.parameters() if isinstance(each, DTensor)]
    weights = [each for each in weights if isinstance(each, Scaled)]
    largest = torch.stack([each.inner.abs().max() for each in weights])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    for weight, scale in zip(weights, Scaled.scale_of(largest).unbind(), strict=True):
        weight.scale = scale


class Ternary(Wrapping):
    """Gathered as -1, 0 and 1 with a mean scale, and multiplied in `__torch_function__`, like torchao's BitNet weight.

    Its collective is not functional.
    """

    class Whole(torch.Tensor):
        @staticmethod
        def __new__(cls, codes, scale):
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=scale.device)

        def __init__(self, codes, scale):
            self.codes, self.scale = codes, scale

        def __tensor_flatten__(self):
            return ["codes", "scale"], None

        @classmethod
        def __tensor_unflatten__(cls, tensors, context, shape, stride):
            return cls(tensors["codes"], tensors["scale"])

        def __repr__(self):
            return f"Ternary.Whole({tuple(self.shape)})"

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is functional.linear:
                return TernaryLinear.apply(*args, **(kwargs or {}))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func in (aten.detach.default, aten.as_strided.default):
                return cls(args[0].codes, args[0].scale)
            raise NotImplementedError(func)

    def fsdp_pre_all_gather(self, mesh):
        scale = self.inner.abs().mean()
        dist.all_reduce(scale, dist.ReduceOp.SUM, group=mesh.get_group())
        scale = scale / mesh.size()
        return ((self.inner / scale.clamp(min=1e-5)).round().clamp(-1, 1).to(torch.int8),), {"scale": scale}

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        scale = metadata["scale"].to(param_dtype)
        if out is not None:
            out.scale = scale
            return None
        return Ternary.Whole(outputs[0], scale), outputs


class TernaryLinear(torch.autograd.Function):
    """The product with a ternary weight, whose gradient is that of the full weight."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight.codes, weight.scale)
        ctx.has_bias = bias is not None
        out = x @ (weight.codes.to(x.dtype) * weight.scale.to(x.dtype)).t()
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx, gradient):
        x, codes, scale = ctx.saved_tensors
        wide = codes.to(gradient.dtype) * scale.to(gradient.dtype)
        flat = gradient.flatten(0, -2)
        return gradient @ wide, flat.t() @ x.flatten(0, -2), flat.sum(0) if ctx.has_bias else None
