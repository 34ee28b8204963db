"""The tensors of a Llama in vLLM, and how vLLM loads full weights into them. vLLM itself requires a GPU.

`layout_of` describes the tensors for `composable_shard.weights`. `Engine.load_weights` follows the loaders of vLLM's
layers (`QKVParallelLinear`, `MergedColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding`), with
`narrow` and without a layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from composable_shard.weights import Box, LocalTensor, Piece, WeightLayout

PADDING = 64  # the rows of vocabularies are a multiple of it
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED["up_proj"] = "gate_up_proj"


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def layout_of(config: Any, rank: int, world: int, at: int, dtype: torch.dtype = torch.float32) -> WeightLayout:
    """Describe the tensors of a tensor-parallel rank.

    Args:
        config: a configuration of Transformers.
        rank, world: tensor-parallel rank, and number of them.
        at: the rank in the process group of the weights.
        dtype: dtype of the tensors.
    """
    held: dict[str, LocalTensor] = {}
    width, inner, dim = config.hidden_size, config.intermediate_size // world, head_dim(config)
    queries, groups = config.num_attention_heads // world, config.num_key_value_heads
    keys, copies = max(groups // world, 1), max(world // groups, 1)  # ranks that have the same key heads

    def add(name: str, *parts: tuple[str, tuple[int, ...], tuple[int, ...]], zeros: int = 0) -> None:
        """Add a tensor of boxes of full tensors (name, offsets, shape), below each other, and rows of zeros."""
        begin, pieces = 0, []
        for source, offsets, shape in parts:
            pieces.append(Piece(source, Box(offsets, shape), (begin,) + (0,) * (len(shape) - 1)))
            begin += shape[0]
        inside = parts[0][2][1:]
        padding = (Box((begin, *(0 for _ in inside)), (zeros, *inside)),) if zeros else ()
        held[name] = LocalTensor((begin + zeros, *inside), dtype, tuple(pieces), padding)

    def vocabulary(name: str) -> None:
        rows = -(-config.vocab_size // PADDING) * PADDING // world
        first, last = (min(rows * each, config.vocab_size) for each in (rank, rank + 1))
        add(name, (name, (first, 0), (last - first, width)), zeros=rows - (last - first))

    vocabulary("model.embed_tokens.weight")
    if not config.tie_word_embeddings:
        vocabulary("lm_head.weight")
    add("model.norm.weight", ("model.norm.weight", (0,), (width,)))
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            add(layer + norm, (layer + norm, (0,), (width,)))
        heads = {"q_proj": (queries, rank), "k_proj": (keys, rank // copies), "v_proj": (keys, rank // copies)}
        add(
            f"{layer}self_attn.qkv_proj.weight",
            *(
                (f"{layer}self_attn.{name}.weight", (place * count * dim, 0), (count * dim, width))
                for name, (count, place) in heads.items()
            ),
        )
        name = f"{layer}self_attn.o_proj.weight"
        add(name, (name, (0, rank * queries * dim), (width, queries * dim)))
        both = ((f"{layer}mlp.{each}.weight", (rank * inner, 0), (inner, width)) for each in ("gate_proj", "up_proj"))
        add(f"{layer}mlp.gate_up_proj.weight", *both)
        name = f"{layer}mlp.down_proj.weight"
        add(name, (name, (0, rank * inner), (width, inner)))
    return WeightLayout({}, {}, {at: held})


class Engine:
    """The tensors of a tensor-parallel rank.

    Attributes:
        tensors: the tensors by vLLM's names.
        loaded: names of the full tensors that `load_weights` got.
    """

    def __init__(self, config: Any, rank: int, world: int, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.rank, self.world = config, rank, world
        shapes = layout_of(config, rank, world, 0, dtype).ranks[0]
        self.tensors = {name: torch.full(each.shape, torch.nan, dtype=dtype) for name, each in shapes.items()}
        self.loaded: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full tensors, as the method of the same name of vLLM's models."""
        for name, weight in weights:
            self.loaded.append(name)
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            kind = name.split(".")[-2]
            tensor = self.tensors[name.replace(kind, FUSED.get(kind, kind))]
            if kind in ("q_proj", "k_proj", "v_proj"):
                self._load_heads(tensor, weight, kind)
            elif kind in ("gate_proj", "up_proj"):
                size = tensor.shape[0] // 2
                tensor.narrow(0, size * (kind == "up_proj"), size).copy_(weight.narrow(0, self.rank * size, size))
            elif kind in ("o_proj", "down_proj"):
                tensor.copy_(weight.narrow(1, self.rank * tensor.shape[1], tensor.shape[1]))
            elif kind in ("embed_tokens", "lm_head"):
                tensor.zero_()
                own = weight[self.rank * tensor.shape[0] : (self.rank + 1) * tensor.shape[0]]
                tensor[: own.shape[0]].copy_(own)
            else:
                tensor.copy_(weight)

    def _load_heads(self, tensor: torch.Tensor, weight: torch.Tensor, kind: str) -> None:
        dim = head_dim(self.config)
        queries = self.config.num_attention_heads // self.world * dim
        keys = (tensor.shape[0] - queries) // 2
        begin = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}[kind]
        size = queries if kind == "q_proj" else keys
        place = self.rank if kind == "q_proj" else self.rank * self.config.num_key_value_heads // self.world
        tensor.narrow(0, begin, size).copy_(weight.narrow(0, place * size, size))
