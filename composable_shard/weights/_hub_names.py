"""Hub names for the stacked experts of Transformers 5."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .._plan.boxes import Box
from ..errors import ShardConfigValueError
from ._layout import LocalTensor, Piece, TensorInfo, WeightLayout

STACK = re.compile(r"(?P<base>.*\.experts)\.(?P<role>[a-z]\w*)")
_ROLES = "gate_up_proj", "down_proj"


class _Style(NamedTuple):
    """How a checkpoint names a block of experts, and the weights of one expert in it."""

    block: str
    gate: str
    up: str
    down: str


_QWEN = _Style("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = _Style("block_sparse_moe", "w1", "w3", "w2")

# As in `conversion_mapping.py` of Transformers 5.18. Types with further conversions are omitted.
_QWEN_TYPES = (
    "afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 flex_olmo glm4_moe glm4_moe_lite hunyuan_v1_moe "
    "jamba mellum olmoe qwen2_moe qwen3_moe qwen3_next solar_open"
)
_STYLES = {
    **dict.fromkeys(_QWEN_TYPES.split(), _QWEN),
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), _MIXTRAL),
}


def hub_names(layout: WeightLayout, model_type: str) -> WeightLayout:
    """Rename the stacked experts in a trainer's layout as in the checkpoints on the Hugging Face hub.

    In memory, Transformers 5 stacks all experts of a layer in ``mlp.experts.gate_up_proj`` of shape [experts, 2 *
    intermediate, hidden] and ``mlp.experts.down_proj`` of shape [experts, hidden, intermediate]. Checkpoints and
    inference engines name the weights of each expert: ``mlp.experts.3.gate_proj.weight`` of shape [intermediate,
    hidden], for example. The tensors of the ranks remain as they are. Only their pieces get other names, and are cut
    at the borders of experts and between gate and up.

    Experts whose gate and up rows alternate (gpt-oss) have the same shapes as other experts. They are refused by
    their `model_type`, not by their shape.

    Args:
        layout: the layout of the ranks that train, for example ``layout(model)``, in any sharding.
        model_type: `model_type` of the Transformers config. For a type that is not in the list, pass one that names
            experts in the same way: "qwen3_moe" (``mlp.experts.0.gate_proj``) or "mixtral"
            (``block_sparse_moe.experts.0.w1``).

    Returns:
        The layout with hub names. A layout without stacked experts is returned as it is.

    Raises:
        ShardConfigValueError: a stack is transposed, has biases or an unknown tensor, or the type is unknown. The
            message lists all problems.
    """
    stacks = {name: match for name in layout.tensors if (match := STACK.fullmatch(name))}
    if not stacks:
        return layout
    problems = [*_problems(layout, stacks, model_type)]
    if problems:
        raise ShardConfigValueError(f"layout: its experts have no hub names: {'; '.join(dict.fromkeys(problems))}")
    renaming = _Renaming(_STYLES[model_type], _stacks(layout, stacks, _STYLES[model_type]))
    return replace(
        layout,
        tensors=dict(sorted(renaming.tensors(layout.tensors))),
        ties={renaming.name(name): renaming.name(first) for name, first in layout.ties.items()},
        ranks={rank: {key: renaming.local(each) for key, each in held.items()} for rank, held in layout.ranks.items()},
    )


def stack_problem(gate_up: tuple[int, ...], down: tuple[int, ...]) -> str:
    """What is wrong with the shapes of stacked experts. Empty if they are as in `hub_names`."""
    expected = (*gate_up[:1], *gate_up[2:], gate_up[1] // 2) if len(gate_up) == 3 else None
    if down == expected and gate_up[1] % 2 == 0:
        return ""
    return (
        f"gate_up_proj has shape {gate_up} and down_proj {down}, which is not [experts, 2 * intermediate, hidden] and "
        "[experts, hidden, intermediate]: the experts may be transposed"
    )


def _problems(layout: WeightLayout, stacks: Mapping[str, re.Match[str]], model_type: str) -> Iterator[str]:
    if model_type not in _STYLES:
        yield (
            f"model_type {model_type!r} is not one of {', '.join(sorted(_STYLES))}; pass 'qwen3_moe' or 'mixtral' if "
            "its checkpoints name experts in this way, and if gate is before up in gate_up_proj"
        )
    yield from _problems_of_stacks(layout, stacks)
    yield from (f"{name} is tied to {first}" for name, first in layout.ties.items() if first in stacks)
    held = [each for tensors in layout.ranks.values() for each in tensors.items()]
    yield from (
        f"{key} has {len(local.shape)} dims, but contains a part of a stack of experts"
        for key, local in held
        if _is_flat(local, stacks)
    )


def _problems_of_stacks(layout: WeightLayout, stacks: Mapping[str, re.Match[str]]) -> Iterator[str]:
    for name, match in stacks.items():
        if problem := _stack_problem(layout, match["base"], match["role"]):
            yield f"{name if match['role'] not in _ROLES else match['base']} {problem}"


def _is_flat(local: LocalTensor, stacks: Container[str]) -> bool:
    """Whether a tensor contains a part of a stack of experts, but has no dim for experts."""
    return any(piece.name in stacks and len(piece.at) != 3 for piece in local.pieces)


def _stack_problem(layout: WeightLayout, base: str, role: str) -> str:
    if role not in _ROLES:
        return "is neither gate_up_proj nor down_proj"
    infos = [info for each in _ROLES if (info := layout.tensors.get(f"{base}.{each}")) is not None]
    if len(infos) < len(_ROLES):
        return "has only one of gate_up_proj and down_proj"
    problem = stack_problem(*(info.shape for info in infos))
    return f"has stacks of another form: {problem}" if problem else ""


class _Projection(NamedTuple):
    """Rows of each matrix of a stack that are one weight of an expert."""

    begin: int
    rows: int
    name: str


@dataclass(frozen=True)
class _Stack:
    """A stack of experts, and its weights in a checkpoint.

    Attributes:
        base: hub name of the experts.
        info: the stack.
        projections: the weights of each expert in it.
    """

    base: str
    info: TensorInfo
    projections: tuple[_Projection, ...]

    def name(self, expert: int, projection: _Projection) -> str:
        return f"{self.base}.{expert}.{projection.name}.weight"

    def tensors(self) -> Iterator[tuple[str, TensorInfo]]:
        """The weights of all experts."""
        experts, _, width = self.info.shape
        for expert in range(experts):
            for each in self.projections:
                yield self.name(expert, each), replace(self.info, shape=(each.rows, width))

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """Cut a piece of the stack into pieces of the weights of experts."""
        width = self.info.shape[2]
        for expert in range(piece.box.offsets[0], piece.box.ends[0]):
            for each in self.projections:
                part = piece.box.common(Box((expert, each.begin, 0), (1, each.rows, width)))
                if part is not None:
                    by = (begin - base for begin, base in zip(part.offsets, piece.box.offsets, strict=True))
                    at = Box(piece.at, part.shape).moved(by).offsets
                    row, column = part.offsets[1] - each.begin, part.offsets[2]
                    yield Piece(self.name(expert, each), Box((row, column), part.shape[1:]), at)


@dataclass(frozen=True)
class _Renaming:
    """Names of a checkpoint for those of a model.

    Attributes:
        style: how the checkpoint names blocks of experts.
        stacks: the stacks of experts, by name in the model.
    """

    style: _Style
    stacks: Mapping[str, _Stack]

    def name(self, name: str) -> str:
        """Hub name of a tensor that is not a stack of experts."""
        return name.replace(".mlp.", f".{self.style.block}.")

    def tensors(self, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
        for name, info in tensors.items():
            if name in self.stacks:
                yield from self.stacks[name].tensors()
            else:
                yield self.name(name), info

    def local(self, local: LocalTensor) -> LocalTensor:
        pieces = (each for piece in local.pieces for each in self._pieces(piece))
        return replace(local, pieces=tuple(pieces))

    def _pieces(self, piece: Piece) -> Iterator[Piece]:
        stack = self.stacks.get(piece.name)
        return iter((piece._replace(name=self.name(piece.name)),)) if stack is None else stack.pieces(piece)


def _stacks(layout: WeightLayout, matches: Mapping[str, re.Match[str]], style: _Style) -> dict[str, _Stack]:
    stacks = {}
    for name, match in matches.items():
        info = layout.tensors[name]
        rows = info.shape[1]
        projections = {
            "gate_up_proj": (_Projection(0, rows // 2, style.gate), _Projection(rows // 2, rows // 2, style.up)),
            "down_proj": (_Projection(0, rows, style.down),),
        }
        base = match["base"].replace(".mlp.", f".{style.block}.")
        stacks[name] = _Stack(base, info, projections[match["role"]])
    return stacks
