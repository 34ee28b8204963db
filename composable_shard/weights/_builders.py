"""Layouts of inference engines, from the names and shapes of a Hugging Face model. No engine is needed.

The rules are those of vLLM's weight loaders (``model_executor/layers``: ``linear.py``, ``vocab_parallel_embedding.py``,
``fused_moe/layer.py``), which SGLang shares, and without fusion those of ``distributed/tensor_parallel.py`` of
Transformers 5.18.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch

from .._plan.boxes import Box, whole_box
from ..errors import ShardConfigValueError
from ._decoder_names import EMBEDDING, HEAD, QUANTIZED, Place, find_place, starred
from ._hub_names import stack_problem
from ._layout import TensorInfo, WeightLayout
from ._recipes import Part, Recipe

Rule = Literal["columns", "rows", "vocabulary", "whole"]
RULES = "columns", "rows", "vocabulary", "whole"


def tensor_parallel(
    tensors: WeightLayout | Mapping[str, TensorInfo],
    config: object,
    degree: int,
    *,
    fused: bool = True,
    vocabulary_multiple: int = 64,
    expert_parallel: bool = False,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    rules: Mapping[str, Rule | None] | None = None,
    rename: Callable[[str], str] = str,
) -> WeightLayout:
    """Build the layout of an inference engine with tensor parallelism.

        source = weights.layout(model)
        target = weights.tensor_parallel(source, model.config, 4).on([8, 9, 10, 11])
        plan = weights.plan_transfer(source, target)

    With `fused`, ranks hold tensors as in vLLM and SGLang:

    - ``qkv_proj`` contains the rank's heads of q, then of k, then of v. If there are more ranks than key heads, several
      ranks hold the same head.
    - ``gate_up_proj`` contains the rank's rows of gate, then of up.
    - ``o_proj`` and ``down_proj`` are split along their columns. Their biases are not split.
    - ``embed_tokens`` and ``lm_head`` are split along the vocabulary, which is padded with zeros.
    - ``experts.w13_weight`` of shape [experts, 2 * intermediate / degree, hidden] contains gate, then up of each
      expert. ``experts.w2_weight`` of shape [experts, hidden, intermediate / degree] contains down.
    - Norms and routers are not split.

    Otherwise, ranks hold tensors as after Transformers' `apply_tensor_parallelism`, for models whose plan splits all
    layers. ``weights.layout(model)`` on the receivers describes other plans, too. The differences are:

    - q, k, v, gate and up are separate, and experts are ``experts.gate_up_proj`` and ``experts.down_proj``.
    - Nothing is padded, and no head is on several ranks.
    - ``embed_tokens`` is split only if ``lm_head`` is tied to it.
    - Projections that are fused in the checkpoint (Phi-3) are split as if they were one.

    Only known names of decoder models are accepted: those of Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma, Mixtral,
    Qwen3-MoE, and of models with the same names. Names of experts may be those of the hub, or of the stacks in
    Transformers 5. See `hub_names`.

    Args:
        tensors: the trainer's layout, or full shapes by name.
        config: the config of a Transformers model, or a mapping with the same settings. For a model of several parts,
            its `text_config`.
        degree: number of ranks.
        fused: whether the engine fuses projections.
        vocabulary_multiple: the vocabulary is padded to a multiple of this. vLLM pads to 64, and with LoRA to 256.
        expert_parallel: each rank holds some experts, instead of a part of each. If the number of experts cannot be
            divided, the first ranks hold one more.
        dtype: dtype of floating-point tensors, or dtypes by pattern of names, as in `fnmatch`. Default: the trainer's.
        rules: rules by pattern of names. The first pattern that matches is used, before the known names. These tensors
            are not fused. The rules are:

            - "columns" splits the first dim: the output of a linear layer.
            - "rows" splits the last dim of a weight: the input of a linear layer. It does not split a bias.
            - "vocabulary" pads and splits the first dim.
            - "whole" splits nothing.
            - None: no rank holds the tensor, for example because it belongs to another stage of a pipeline.
        rename: function from a name above to the engine's name. Names of experts depend on the version of vLLM, for
            example.

    Returns:
        The layout of ranks 0 to `degree` - 1. Combine the layouts of replicas and stages with ``WeightLayout.merged``.
        If the config ties the head to the embedding, ranks hold one tensor for both, as ``embed_tokens.weight``.

    Raises:
        ShardConfigValueError: an argument is invalid, a name is unknown, a shape does not match the config, a size
            cannot be divided, or a tensor is quantized. The message lists all problems with tensors.
    """
    _check_arguments(degree, vocabulary_multiple, fused or not expert_parallel)
    infos, ties = _tied(tensors, config)
    engine = _Engine(infos, config, degree, fused, vocabulary_multiple, expert_parallel, dtype, rules or {})
    recipes = sorted(
        (replace(each, local=rename(each.local)) for each in engine.recipes()), key=lambda each: each.local
    )
    problems = [*engine.problems, *_equal_names(recipes)]
    if problems:
        raise ShardConfigValueError(
            f"tensors: cannot be split over {degree} ranks: {'; '.join(dict.fromkeys(problems))}"
        )
    held = {name for recipe in recipes for name in recipe.names}
    return WeightLayout(
        {name: infos[name] for name in sorted(held)},
        {name: first for name, first in sorted(ties.items()) if first in held},
        {rank: {each.local: each.on(rank) for each in recipes} for rank in range(degree)},
    )


def _check_arguments(degree: int, vocabulary_multiple: int, has_layout: bool) -> None:
    """Check the arguments of `tensor_parallel`.

    Raises:
        ShardConfigValueError: one is invalid.
    """
    for argument, value in {"degree": degree, "vocabulary_multiple": vocabulary_multiple}.items():
        if value < 1:
            raise ShardConfigValueError(f"{argument}: must be at least 1; got {value}")
    if not has_layout:
        raise ShardConfigValueError(
            "expert_parallel: has no layout with fused=False, because Transformers then splits only experts; describe "
            "the receiving model with weights.layout"
        )


def _equal_names(recipes: Sequence[Recipe]) -> Iterator[str]:
    counts = Counter(each.local for each in recipes)
    return (f"{count} tensors get the name {name}" for name, count in counts.items() if count > 1)


def _tied(
    tensors: WeightLayout | Mapping[str, TensorInfo], config: object
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and ties as in an engine, which decides by the config whether the head has a tensor of its own."""
    given = tensors if isinstance(tensors, WeightLayout) else WeightLayout(dict(tensors))
    infos = given.tensors | {name: given.tensors[first] for name, first in given.ties.items()}
    ties = {**given.ties}
    embeddings, heads = ([*filter(pattern.fullmatch, infos)] for pattern in (EMBEDDING, HEAD))
    if len(embeddings) == len(heads) == 1:
        _tie(ties, embeddings[0], heads[0], _setting(config, "tie_word_embeddings"))
    return {name: info for name, info in infos.items() if name not in ties}, ties


def _tie(ties: dict[str, str], embedding: str, head: str, by_config: bool | None) -> None:
    """Tie the head to the embedding, or untie them. Without a setting, they are tied if the trainer's are."""
    first_of_head, first_of_embedding = ties.pop(head, None), ties.pop(embedding, None)
    are_tied = first_of_head == embedding or first_of_embedding == head
    if are_tied if by_config is None else by_config:
        ties[head] = embedding


def _setting(config: object, *names: str) -> Any:
    """The first of some settings that a config has; None if it has none of them."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return None


class _Heads(NamedTuple):
    """Heads of attention. `size` and `value_size` are the rows of a head in q and k, and in v."""

    queries: int
    keys: int
    size: int
    value_size: int

    @classmethod
    def of(cls, config: object) -> _Heads | None:
        """Read them from a config; None if it does not have them, or has others for each layer."""
        queries, hidden = _setting(config, "num_attention_heads"), _setting(config, "hidden_size")
        size = _setting(config, "head_dim")
        if size is None and isinstance(queries, int) and isinstance(hidden, int):
            size = hidden // queries
        heads: list[Any] = [queries, _setting(config, "num_key_value_heads") or queries, size]
        heads.append(_setting(config, "v_head_dim") or size)
        return cls(*heads) if all(isinstance(each, int) and each > 0 for each in heads) else None

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each projection."""
        q, k, v = self.queries * self.size, self.keys * self.size, self.keys * self.value_size
        return {"q_proj": q, "k_proj": k, "v_proj": v, "qkv_proj": q + k + v}


@dataclass
class _Engine:
    """The rules for one engine.

    Attributes:
        infos: the full tensors.
        config, degree, fused, vocabulary_multiple, expert_parallel, dtype, rules: as in `tensor_parallel`.
    """

    infos: Mapping[str, TensorInfo]
    config: object
    degree: int
    fused: bool
    vocabulary_multiple: int
    expert_parallel: bool
    dtype: torch.dtype | Mapping[str, torch.dtype] | None
    rules: Mapping[str, Rule | None]

    def __post_init__(self) -> None:
        self.heads = _Heads.of(self.config)
        self.problems = [
            f"rules: {pattern!r} has the rule {rule!r}, which is none of {', '.join(RULES)} and None"
            for pattern, rule in self.rules.items()
            if rule is not None and rule not in RULES
        ]

    def recipes(self) -> list[Recipe]:
        """The tensors of the engine. Appends to `problems`."""
        families = {"attention": self._attention, "feed_forward": self._feed_forward, "experts": self._experts}
        recipes: list[Recipe] = []
        modules: defaultdict[Place, dict[tuple[int, str], str]] = defaultdict(dict)
        for name in self.infos:
            pattern = next((each for each in self.rules if fnmatchcase(name, each)), None)
            if pattern is not None:
                rule = self.rules[pattern]
                recipes += [] if rule is None else self._by_rule(name, rule)
            elif (place := self._known(name)) is not None:
                if place.family in families:
                    modules[Place(place.family, place.base, "", place.end)][place.expert, place.role] = name
                else:
                    recipes += self._single(name, place)
        for module, names in modules.items():
            recipes += families[module.family](module, names)
        for recipe in recipes:
            self.problems += recipe.problems()
        return recipes

    def _known(self, name: str) -> Place | None:
        """The place of a tensor without a rule of the user."""
        place, info = find_place(name), self.infos[name]
        problem = ""
        if place is None and QUANTIZED.fullmatch(name):
            problem = "belongs to a quantized weight; send weights that are not quantized"
        elif place is None:
            problem = f"has an unknown name; declare it with rules={{{starred(name)!r}: 'whole'}}, for example"
        elif not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            problem = f"has dtype {info.dtype}; send weights that are not quantized"
        elif place.ndim not in (None, len(info.shape)):
            problem = f"has shape {info.shape}, but should have {place.ndim} dims"
        if problem:
            self.problems.append(f"{starred(name)} {problem}")
        return None if problem else place

    # -- single tensors

    def _single(self, name: str, place: Place) -> Iterable[Recipe]:
        """A tensor that is not combined with others."""
        if place.family == "head_norm":
            return self._head_norm(name, place)
        if place.family == "output":
            self._check_output(name, place)
            return self._by_rule(name, "rows")
        if place.family == "vocabulary":
            return self._vocabulary(name)
        return self._by_rule(name, "rows" if place.family == "rows" else "whole")

    def _by_rule(self, name: str, rule: Rule) -> list[Recipe]:
        shape = self.infos[name].shape
        if not shape or rule == "whole" or (rule == "rows" and len(shape) == 1):
            return [self._recipe(name, (Part(name, whole_box(shape)),))]
        dim = -1 if rule == "rows" else -len(shape)
        padded = None
        if rule == "vocabulary":
            padded = math.ceil(shape[0] / self.vocabulary_multiple) * self.vocabulary_multiple
        return [self._recipe(name, (Part(name, whole_box(shape), dim, self.degree, padded=padded),), dim)]

    def _recipe(self, local: str, parts: tuple[Part, ...], dim: int = -1) -> Recipe:
        return Recipe(local, self._dtype([part.name for part in parts]), (parts,), dim)

    def _dtype(self, names: Iterable[str]) -> torch.dtype:
        dtypes = {self._dtype_of(name): name for name in names}
        if len(dtypes) > 1:
            [first, second, *_] = dtypes
            self.problems.append(
                f"{starred(dtypes[first])} and {starred(dtypes[second])} are parts of one tensor, but have dtypes "
                f"{first} and {second}"
            )
        return next(iter(dtypes))

    def _dtype_of(self, name: str) -> torch.dtype:
        own = self.infos[name].dtype
        if not own.is_floating_point or self.dtype is None:
            return own
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return next((dtype for pattern, dtype in self.dtype.items() if fnmatchcase(name, pattern)), own)

    def _vocabulary(self, name: str) -> list[Recipe]:
        rows, expected = self.infos[name].shape[0], _setting(self.config, "vocab_size")
        if expected is not None and rows != expected:
            self.problems.append(f"{name} has {rows} rows, but config.vocab_size is {expected}")
        if self.fused:
            return self._by_rule(name, "vocabulary")
        has_own_head = any(map(HEAD.fullmatch, self.infos))
        return self._by_rule(name, "whole" if EMBEDDING.fullmatch(name) and has_own_head else "columns")

    def _head_norm(self, name: str, place: Place) -> list[Recipe]:
        """Norms of q and k. Those of single heads are whole; others depend on the engine."""
        shape = self.infos[name].shape
        if self.heads is not None and shape != (self.heads.size,):
            self.problems.append(
                f"{starred(name)} has shape {shape}, which is not one head of {self.heads.size}; declare it with "
                f"rules={{'*.{place.role}.weight': 'whole'}}, for example"
            )
        return self._by_rule(name, "whole")

    def _check_output(self, name: str, place: Place) -> None:
        shape = self.infos[name].shape
        if self.heads is not None and place.end == "weight":
            expected = self.heads.queries * self.heads.value_size
            if shape[1] != expected:
                self.problems.append(f"{starred(name)} has {shape[1]} columns, but the config means {expected}")

    # -- attention

    def _attention(self, module: Place, names: Mapping[tuple[int, str], str]) -> list[Recipe]:
        by_role = {role: name for (_, role), name in names.items()}
        roles = "q_proj", "k_proj", "v_proj"
        if (
            not self._complete(module, by_role, (("qkv_proj",), roles))
            or (heads := self._checked_heads()) is None
            or not self._have_rows(by_role, heads)
        ):
            return []
        if not self.fused:
            return [recipe for name in by_role.values() for recipe in self._by_rule(name, "columns")]
        boxes = self._separate(by_role, "qkv_proj", {role: heads.rows[role] for role in roles})
        copies = {"q_proj": 1, "k_proj": max(1, self.degree // heads.keys), "v_proj": max(1, self.degree // heads.keys)}
        parts = (Part(*boxes[role], -len(boxes[role][1].shape), self.degree, copies[role]) for role in roles)
        return [self._side_by_side(f"{module.base}.qkv_proj.{module.end}", tuple(parts))]

    def _side_by_side(self, local: str, parts: tuple[Part, ...]) -> Recipe:
        """Projections one after the other along their first dim."""
        return self._recipe(local, parts, -len(parts[0].box.shape))

    def _checked_heads(self) -> _Heads | None:
        """Heads that can be split; None, and a problem, if they cannot."""
        if self.heads is None:
            self.problems.append(
                "config: has no number for num_attention_heads, num_key_value_heads or head_dim; of a model of several "
                "parts, pass the text_config"
            )
            return None
        queries, keys = self.heads.queries, self.heads.keys
        problems = []
        if queries % self.degree:
            problems.append(f"config: {queries} attention heads cannot be divided by {self.degree}")
        if keys % self.degree and (not self.fused or self.degree % keys):
            problems.append(f"config: {keys} key and value heads cannot be split over {self.degree} ranks")
        self.problems += problems
        return None if problems else self.heads

    def _have_rows(self, by_role: Mapping[str, str], heads: _Heads) -> bool:
        problems = [
            f"{starred(name)} has {self.infos[name].shape[0]} rows, but the config means {heads.rows[role]}"
            for role, name in by_role.items()
            if self.infos[name].shape[0] != heads.rows[role]
        ]
        self.problems += problems
        return not problems

    def _complete(self, module: Place, by_role: Mapping[str, str], choices: Sequence[Sequence[str]]) -> bool:
        """Whether a module has all tensors of one of some choices, and no others."""
        if any(set(by_role) == set(choice) for choice in choices):
            return True
        self.problems.append(
            f"{starred(module.base)} has {', '.join(sorted(by_role))} with a {module.end or 'weight'}, but must have "
            f"{' or '.join(', '.join(choice) for choice in choices)}"
        )
        return False

    def _separate(
        self, by_role: Mapping[str, str], together: str, rows: Mapping[str, int]
    ) -> dict[str, tuple[str, Box]]:
        """Names and boxes of projections, which may be rows of one tensor (Phi-3)."""
        if together not in by_role:
            return {role: (by_role[role], whole_box(self.infos[by_role[role]].shape)) for role in rows}
        whole, begin = whole_box(self.infos[by_role[together]].shape), 0
        boxes = {}
        for role, size in rows.items():
            boxes[role] = by_role[together], whole.part(0, begin, size)
            begin += size
        return boxes

    # -- feed-forward layers

    def _feed_forward(self, module: Place, names: Mapping[tuple[int, str], str]) -> list[Recipe]:
        by_role = {role: name for (_, role), name in names.items()}
        roles = "gate_proj", "up_proj"
        if not self._complete(module, by_role, (("gate_up_proj",), roles, ("up_proj",))):
            return []
        if not self.fused or set(by_role) == {"up_proj"}:
            return [recipe for name in by_role.values() for recipe in self._by_rule(name, "columns")]
        rows = self.infos[next(iter(by_role.values()))].shape[0]
        if "gate_up_proj" in by_role and rows % 2:
            self.problems.append(f"{starred(by_role['gate_up_proj'])} has an odd number of rows, {rows}")
            return []
        boxes = self._separate(by_role, "gate_up_proj", dict.fromkeys(roles, rows // 2))
        parts = tuple(Part(*boxes[role], -len(boxes[role][1].shape), self.degree) for role in roles)
        return [self._side_by_side(f"{module.base}.gate_up_proj.{module.end}", parts)]

    # -- experts

    def _experts(self, module: Place, names: Mapping[tuple[int, str], str]) -> list[Recipe]:
        boxes = self._boxes_of_experts(module, names)
        if boxes is None:
            return []
        local = {True: ("w13_weight", "w2_weight"), False: ("gate_up_proj", "down_proj")}[self.fused]
        return [
            self._stack(f"{module.base}.{local[0]}", boxes, ("gate_proj", "up_proj"), -2),
            self._stack(f"{module.base}.{local[1]}", boxes, ("down_proj",), -1),
        ]

    def _stack(
        self, local: str, boxes: Sequence[Mapping[str, tuple[str, Box]]], roles: Sequence[str], dim: int
    ) -> Recipe:
        split = None if self.expert_parallel else dim
        groups = tuple(tuple(Part(*each[role], split, self.degree) for role in roles) for each in boxes)
        dtype = self._dtype(dict.fromkeys(part.name for parts in groups for part in parts))
        return Recipe(local, dtype, groups, dim, True, self.degree if self.expert_parallel else 1)

    def _boxes_of_experts(
        self, module: Place, names: Mapping[tuple[int, str], str]
    ) -> list[dict[str, tuple[str, Box]]] | None:
        """Names and boxes of the projections of each expert; None, and a problem, if they are not as expected."""
        stacks = {role: name for (expert, role), name in names.items() if expert < 0}
        count = len({expert for expert, _ in names}) if not stacks else self.infos[next(iter(stacks.values()))].shape[0]
        expected = _setting(self.config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        if expected not in (None, count):
            problem = f"there are {count} experts, but the config means {expected}"
        else:
            problem = self._problem_of_stacks(stacks, len(names)) if stacks else _problem_of_experts(count, names)
        if problem:
            self.problems.append(f"{starred(module.base)}: {problem}")
            return None
        return [self._boxes_of_expert(expert, names, stacks) for expert in range(count)]

    def _problem_of_stacks(self, stacks: Mapping[str, str], names: int) -> str:
        if len(stacks) != 2 or names != 2:
            return "there must be gate_up_proj and down_proj, and no others"
        return stack_problem(*(self.infos[stacks[role]].shape for role in ("gate_up_proj", "down_proj")))

    def _boxes_of_expert(
        self, expert: int, names: Mapping[tuple[int, str], str], stacks: Mapping[str, str]
    ) -> dict[str, tuple[str, Box]]:
        if not stacks:
            own = {role: names[expert, role] for role in ("gate_proj", "up_proj", "down_proj")}
            return {role: (name, whole_box(self.infos[name].shape)) for role, name in own.items()}
        gate_up, down = (
            whole_box(self.infos[stacks[role]].shape).part(0, expert, 1) for role in ("gate_up_proj", "down_proj")
        )
        rows = gate_up.shape[1] // 2
        return {
            "gate_proj": (stacks["gate_up_proj"], gate_up.part(1, 0, rows)),
            "up_proj": (stacks["gate_up_proj"], gate_up.part(1, rows, rows)),
            "down_proj": (stacks["down_proj"], down),
        }


def _problem_of_experts(count: int, names: Mapping[tuple[int, str], str]) -> str:
    wanted = {(expert, role) for expert in range(count) for role in ("gate_proj", "up_proj", "down_proj")}
    return "" if wanted == set(names) else "some experts do not have gate_proj, up_proj and down_proj, or w1, w3 and w2"
