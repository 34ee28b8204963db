"""Models that combine several types of parallelism on four ranks, for comparison with unsharded models."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import _experts
from _engines import FullyShard, mesh_of, named_mesh
from composable_shard import DataParallelMeshDims, FSDPMeshInfo, ShardPlacementResult

# ---- a small language model


class Attention(nn.Module):
    """Attention with two heads; with tensor parallelism, only this rank's heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.head_dim = dim // 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Text(nn.Module):
    """A small language model from tokens to logits."""

    def __init__(self, vocabulary: int = 12, dim: int = 8, hidden: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class LongText(Text):
    """A language model with checkpointed layers, so that only one activation per layer is kept."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


LAYER_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),  # a DTensor keeps the size if it is uneven
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
MODEL_PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def parallelize(model: Text, mesh: DeviceMesh) -> Text:
    """Apply tensor and sequence parallelism to the whole model. The logits stay sharded along the vocabulary."""
    for layer in model.layers:
        parallelize_module(layer, mesh, LAYER_PLAN)
    parallelize_module(model, mesh, MODEL_PLAN)
    return model


def shard_text(model: Text, engine: FullyShard, **options: Any) -> Text:
    for layer in model.layers:
        engine(layer, **options)
    return engine(model, **options)


def text_loss(model: nn.Module, part: int, step: int) -> Tensor:
    """Run forward and backward of one batch. Returns the loss."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return whole(token_loss(model, *torch.randint(0, model.vocabulary, (2, 3, 6), generator=generator)))


def token_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens)
    with loss_parallel() if isinstance(logits, DTensor) else contextlib.nullcontext():
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
    return loss.detach()


def whole(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensor warns about the number of collectives
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---- experts


def experts_loss(model: nn.Module, part: int, step: int) -> Tensor:
    loss = model(torch.randn(6, _experts.DIM, generator=torch.Generator().manual_seed(10 * step + part)))
    loss = loss.square().mean()
    loss.backward()
    return loss.detach()


def shard_experts(model: Any, engine: FullyShard, **options: Any) -> Any:
    dense, sparse = named_mesh((4,), ("dp",)), named_mesh((2, 2), ("edp", "ep"))
    _experts.distribute(model, sparse["ep"])
    info = FSDPMeshInfo(sparse["edp"], shard_mesh_dim=0)
    experts = {id(p) for block in model.blocks for p in block.moe.experts.parameters()}

    def choose(param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, info) if id(param) in experts else None

    for block in model.blocks:
        engine(block, mesh=dense, shard_placement_fn=choose, **options)
        block.set_gradient_divide_factor(4)  # an expert gets tokens from all ranks
    return engine(model, mesh=dense, **options)


# ---- parameters on a mesh with all types of parallelism


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) * self.scale


def mlps() -> nn.Sequential:
    return nn.Sequential(Mlp(), Mlp())


MLP_PLACEMENTS = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


def distribute(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Distribute all parameters over all axes: with tensor parallelism on `tp`, replicated on the others."""
    for mlp in model:
        for module_name, module in mlp.named_modules():
            for name, param in list(module._parameters.items()):
                if param is not None:
                    own = MLP_PLACEMENTS.get(f"{module_name}.{name}", Replicate())
                    placements = [own if axis == "tp" else Replicate() for axis in mesh.mesh_dim_names]
                    module._parameters[name] = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
    return model


def shard_mlps(model: nn.Sequential, engine: FullyShard, **options: Any) -> nn.Sequential:
    for mlp in model:
        engine(mlp, **options)
    return engine(model, **options)


def mlps_loss(model: nn.Module, part: int, step: int) -> Tensor:
    """Run forward and backward of a batch that is split over the ranks. The loss is a mean over the whole batch.

    In the other models, each rank has its own loss.
    """
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + part))
    weight, parts = next(model.parameters()), 1
    if isinstance(weight, DTensor):
        x, parts = DTensor.from_local(x, weight.device_mesh, [Shard(0), Replicate()]), weight.device_mesh.size(0)
    loss = model(x).square().mean() * parts
    loss.backward()
    return whole(loss.detach())


def shard_over_dp(model: nn.Sequential, engine: FullyShard, mesh: DeviceMesh) -> nn.Sequential:
    return shard_mlps(distribute(model, mesh), engine, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


# ---- compositions


@dataclass(frozen=True)
class Composition:
    """One way to shard a model.

    Attributes:
        make: creates the unsharded model.
        shard: shards a model in place.
        shape, names: sizes and names of the axes of a mesh of all four ranks.
        data: axes along which ranks have different batches.
        loss: runs forward and backward of one batch, and returns the loss.
    """

    make: Callable[[], nn.Module]
    shard: Callable[[nn.Module, FullyShard, DeviceMesh], Any]
    shape: tuple[int, ...]
    names: tuple[str, ...]
    data: tuple[str, ...]
    loss: Callable[[nn.Module, int, int], Tensor] = text_loss

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of(*self.shape) if self.names == ("replicate", "shard") else named_mesh(self.shape, self.names)

    @property
    def parts(self) -> int:
        """The number of batches in a step."""
        return self.mesh[self.data].size()

    @property
    def part(self) -> int:
        """The index of this rank's batch."""
        at = 0
        for name in self.data:
            at = at * self.mesh[name].size() + self.mesh.get_local_rank(name)
        return at

    def pair(self, engine: FullyShard, seed: int = 3) -> tuple[nn.Module, nn.Module]:
        """Create the unsharded model and the sharded one."""
        torch.manual_seed(seed)
        plain = self.make()
        model = copy.deepcopy(plain)
        self.shard(model, engine, self.mesh)
        return plain, model

    def mean_gradients(self, plain: nn.Module, step: int) -> dict[str, Tensor]:
        """Gradients computed in one process, averaged over the batches."""
        total: dict[str, Tensor] = {}
        for part in range(self.parts):
            plain.zero_grad()
            self.loss(plain, part, step)
            for name, p in plain.named_parameters():
                assert p.grad is not None
                total[name] = total.get(name, 0) + p.grad / self.parts
        return total


def tensor_parallel(mesh_axes: Any = "dp", **options: Any) -> Callable[..., Any]:
    def shard(model: Text, engine: FullyShard, mesh: DeviceMesh) -> Text:
        return shard_text(parallelize(model, mesh["tp"]), engine, mesh=mesh[mesh_axes], **options)

    return shard


def another_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


def uneven() -> LongText:
    """A model whose sizes are divisible neither by the tensor-parallel ranks nor then by the data-parallel ranks."""
    return LongText(vocabulary=11, hidden=13)


def hybrid(model: Text, engine: FullyShard, mesh: DeviceMesh) -> Text:
    return shard_text(model, engine, mesh=mesh, reshard_after_forward=True)


COMPOSITIONS = {
    "tensor parallel": Composition(Text, tensor_parallel(), (2, 2), ("dp", "tp"), ("dp",)),
    "tensor parallel, computed again": Composition(LongText, tensor_parallel(), (2, 2), ("dp", "tp"), ("dp",)),
    "tensor parallel, weights kept": Composition(
        Text, tensor_parallel(reshard_after_forward=False), (2, 2), ("dp", "tp"), ("dp",)
    ),
    "tensor parallel, along another dim": Composition(
        Text, tensor_parallel(shard_placement_fn=another_dim), (2, 2), ("dp", "tp"), ("dp",)
    ),
    "tensor parallel, uneven, computed again": Composition(uneven, tensor_parallel(), (2, 2), ("dp", "tp"), ("dp",)),
    "replicas": Composition(Text, hybrid, (2, 2), ("replicate", "shard"), ("replicate", "shard")),
    "replicas of tensor parallel": Composition(
        Text,
        tensor_parallel(("replicate", "shard")),
        (2, 1, 2),
        ("replicate", "shard", "tp"),
        ("replicate", "shard"),
    ),
    "tensor parallel, one replica": Composition(
        Text,
        tensor_parallel(("replicate", "shard")),
        (1, 2, 2),
        ("replicate", "shard", "tp"),
        ("replicate", "shard"),
    ),
    "a mesh of all kinds": Composition(mlps, shard_over_dp, (2, 2), ("dp", "tp"), ("dp",), mlps_loss),
    "experts": Composition(
        _experts.Net,
        lambda model, engine, mesh: shard_experts(model, engine),
        (4,),
        ("dp",),
        ("dp",),
        experts_loss,
    ),
}
