"""Layouts of inference engines match vLLM's weight loaders, which are restated here on full tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composable_shard import weights
from composable_shard._plan.boxes import Sharding, Split, local_shape, whole_box
from composable_shard.errors import LayoutMismatchError, ShardConfigValueError
from composable_shard.weights import Box, LocalTensor, Piece, TensorInfo, WeightLayout
from composable_shard.weights._describe import Parts

HIDDEN = 12


# ---- models: full tensors by hub name


def config_of(**settings):
    """Settings of a tiny model, under the names of Transformers."""
    common = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 100,
        "hidden_size": HIDDEN,
    }
    return {**common, "intermediate_size": 24, "tie_word_embeddings": False, **settings}


def shapes_of(config, *, bias=False, qk_norm=False, mlp="llama", fused_on_disk=False, layers=2):
    """Shapes by hub name."""
    queries, keys = (config[f"num_{each}_heads"] * config["head_dim"] for each in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], HIDDEN)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        linears = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        linears = {"qkv_proj": sum(linears.values())} if fused_on_disk else linears
        for name, rows in linears.items():
            shapes[f"{base}.self_attn.{name}.weight"] = (rows, HIDDEN)
            if bias:
                shapes[f"{base}.self_attn.{name}.bias"] = (rows,)
        shapes[f"{base}.self_attn.o_proj.weight"] = (HIDDEN, queries)
        if bias:
            shapes[f"{base}.self_attn.o_proj.bias"] = (HIDDEN,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{base}.{norm}.weight"] = (HIDDEN,)
        for norm in ("q_norm", "k_norm") if qk_norm else ():
            shapes[f"{base}.self_attn.{norm}.weight"] = (config["head_dim"],)
        shapes |= {f"{base}.{name}": shape for name, shape in MLPS[mlp](config).items()}
    return shapes


def llama_mlp(config):
    inner = config["intermediate_size"]
    rows = {f"mlp.{each}_proj.weight": (inner, HIDDEN) for each in ("gate", "up")}
    return {**rows, "mlp.down_proj.weight": (HIDDEN, inner)}


def phi3_mlp(config):
    inner = config["intermediate_size"]
    return {"mlp.gate_up_proj.weight": (2 * inner, HIDDEN), "mlp.down_proj.weight": (HIDDEN, inner)}


def experts_mlp(block, gate, up, down):
    def shapes(config):
        inner = config["moe_intermediate_size"]
        each = {gate: (inner, HIDDEN), up: (inner, HIDDEN), down: (HIDDEN, inner)}
        experts = {
            f"{block}.experts.{expert}.{name}.weight": shape
            for expert in range(config["num_experts"])
            for name, shape in each.items()
        }
        return {f"{block}.gate.weight": (config["num_experts"], HIDDEN), **experts}

    return shapes


def stacked_mlp(config):
    count, inner = config["num_experts"], config["moe_intermediate_size"]
    return {
        "mlp.gate.weight": (count, HIDDEN),
        "mlp.experts.gate_up_proj": (count, 2 * inner, HIDDEN),
        "mlp.experts.down_proj": (count, HIDDEN, inner),
    }


MLPS: dict[str, Callable] = {
    "llama": llama_mlp,
    "phi3": phi3_mlp,
    "qwen3_moe": experts_mlp("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": experts_mlp("block_sparse_moe", "w1", "w3", "w2"),
    "transformers5": stacked_mlp,
}


def infos_of(shapes, dtype=torch.float32):
    return {name: TensorInfo(shape, dtype) for name, shape in shapes.items()}


def values_of(shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


# ---- the oracle: what the loaders of an engine do with full tensors


class Loader:
    """Loads full tensors into one rank as vLLM does, one method for each layer class."""

    def __init__(self, full: dict[str, Tensor], config, rank, degree, *, multiple=64, expert_parallel=False):
        self.full, self.config, self.rank, self.degree = full, config, rank, degree
        self.multiple, self.expert_parallel = multiple, expert_parallel
        self.tensors: dict[str, Tensor] = {}

    def chunk(self, tensor, dim):
        size = tensor.shape[dim] // self.degree
        return tensor.narrow(dim, self.rank * size, size)

    def column_parallel(self, name):
        self.tensors[name] = self.chunk(self.full[name], 0)

    def row_parallel(self, name):
        self.tensors[name] = self.chunk(self.full[name], 1) if name.endswith("weight") else self.full[name]

    def replicated(self, name):
        self.tensors[name] = self.full[name]

    def merged_column_parallel(self, local, gate, up):
        self.tensors[local] = torch.cat([self.chunk(gate, 0), self.chunk(up, 0)])

    def qkv_parallel(self, local, q, k, v):
        size, keys = self.config["head_dim"], self.config["num_key_value_heads"]
        heads = self.config["num_attention_heads"] // self.degree
        key_heads, replicas = (1, self.degree // keys) if self.degree >= keys else (keys // self.degree, 1)
        begin, rows = self.rank // replicas * key_heads * size, key_heads * size
        own = q.narrow(0, self.rank * heads * size, heads * size)
        self.tensors[local] = torch.cat([own, k.narrow(0, begin, rows), v.narrow(0, begin, rows)])

    def vocabulary_parallel(self, name):
        full = self.full[name]
        padded = math.ceil(len(full) / self.multiple) * self.multiple
        rows = padded // self.degree
        local = torch.zeros(rows, *full.shape[1:])
        own = full[self.rank * rows : (self.rank + 1) * rows]
        local[: len(own)] = own
        self.tensors[name] = local

    def experts(self, base, gates, ups, downs):
        """`gates`, `ups` and `downs` are lists of one matrix per expert."""
        indices = range(len(gates))
        if self.expert_parallel:
            counts = [len(gates) // self.degree + (rank < len(gates) % self.degree) for rank in range(self.degree)]
            first = sum(counts[: self.rank])
            indices = indices[first : first + counts[self.rank]]
        cut = (lambda tensor, dim: tensor) if self.expert_parallel else self.chunk
        w13 = [torch.cat([cut(gates[each], 0), cut(ups[each], 0)]) for each in indices]
        self.tensors[f"{base}.w13_weight"] = torch.stack(w13)
        self.tensors[f"{base}.w2_weight"] = torch.stack([cut(downs[each], 1) for each in indices])


def load(full, config, rank, degree, **options):
    """The tensors of a rank."""
    loader = Loader(full, config, rank, degree, **options)
    for name in full:
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            loader.vocabulary_parallel(name)
        elif "norm" in name or name.endswith(".gate.weight"):
            loader.replicated(name)
        elif name.endswith(("o_proj.weight", "o_proj.bias", "mlp.down_proj.weight")):
            loader.row_parallel(name)
    bases = dict.fromkeys(name.split(".self_attn")[0] for name in full if ".self_attn" in name)
    for base in bases:
        load_attention(loader, f"{base}.self_attn")
        load_feed_forward(loader, base)
    return loader.tensors


def load_attention(loader, base):
    full = loader.full
    for end in ("weight", "bias"):
        if f"{base}.qkv_proj.{end}" in full:
            size, keys = loader.config["head_dim"], loader.config["num_key_value_heads"]
            rows = [loader.config["num_attention_heads"] * size, keys * size, keys * size]
            loader.qkv_parallel(f"{base}.qkv_proj.{end}", *full[f"{base}.qkv_proj.{end}"].split(rows))
        elif f"{base}.q_proj.{end}" in full:
            own = [full[f"{base}.{each}_proj.{end}"] for each in "qkv"]
            loader.qkv_parallel(f"{base}.qkv_proj.{end}", *own)


def load_feed_forward(loader, base):
    full = loader.full
    if f"{base}.mlp.gate_up_proj.weight" in full:
        local = f"{base}.mlp.gate_up_proj.weight"
        loader.merged_column_parallel(local, *full[local].chunk(2))
    elif f"{base}.mlp.gate_proj.weight" in full:
        own = [full[f"{base}.mlp.{each}_proj.weight"] for each in ("gate", "up")]
        loader.merged_column_parallel(f"{base}.mlp.gate_up_proj.weight", *own)
    elif f"{base}.mlp.experts.gate_up_proj" in full:
        gates, ups = zip(*(each.chunk(2) for each in full[f"{base}.mlp.experts.gate_up_proj"]), strict=True)
        loader.experts(f"{base}.mlp.experts", gates, ups, full[f"{base}.mlp.experts.down_proj"])
    else:
        for block, names in (("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))):
            experts = range(loader.config["num_experts"])
            if f"{base}.{block}.experts.0.{names[0]}.weight" in full:
                own = [[full[f"{base}.{block}.experts.{each}.{name}.weight"] for each in experts] for name in names]
                loader.experts(f"{base}.{block}.experts", *own)


# ---- tensors from a layout


def assemble(layout: WeightLayout, rank, full):
    """Fill the tensors of a rank from full tensors."""
    filled = {}
    for key, local in layout.ranks[rank].items():
        assert not [*local.problems()]
        tensor = torch.full(local.shape, torch.nan, dtype=local.dtype)
        for name, box, at in local.pieces:
            place = Piece(name, box, at).local
            tensor[place.slices(whole_box(local.shape))] = full[name][box.slices(whole_box(full[name].shape))]
        for box in local.zeros:
            tensor[box.slices(whole_box(local.shape))] = 0
        filled[key] = tensor
    return filled


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def sharded(infos, world, dim_of=lambda name, shape: 0):
    """The layout of a trainer with one axis of sharding, as after fully_shard."""
    ranks = {rank: {} for rank in range(world)}
    for name, info in infos.items():
        split = Sharding((world,), tuple(range(world)), (Split(dim_of(name, info.shape)),))
        for rank, regions in enumerate(split.regions(info.shape)):
            pieces = tuple(Piece(name, box, at) for box, at in regions if box.numel)
            ranks[rank][name] = LocalTensor(local_shape(regions), info.dtype, pieces)
    return WeightLayout(dict(infos), {}, ranks)


def assert_minimal(plan, target):
    """Each receiver gets each element that it holds, once."""
    held = sum(
        part.numel * local.dtype.itemsize
        for tensors in target.ranks.values()
        for local in tensors.values()
        for part in (piece.box for piece in local.pieces)
    )
    assert plan.total_bytes == held
    assert plan.ranks == [*plan.source.ranks, *target.ranks]


def check(shapes, config, degree, *, world=3, **options):
    """Compare with the oracle, and plan a transfer from a trainer."""
    infos, full = infos_of(shapes), values_of(shapes)
    layout = weights.tensor_parallel(infos, config, degree, **options)
    multiple = options.get("vocabulary_multiple", 64)
    for rank in range(degree):
        theirs = load(
            full, config, rank, degree, multiple=multiple, expert_parallel=options.get("expert_parallel", False)
        )
        assert_equal(assemble(layout, rank, full), theirs)
    target = layout.on(range(world, world + degree))
    assert_minimal(weights.plan_transfer(sharded(infos, world), target), target)


# ---- tests

DEGREES = st.sampled_from([1, 2, 3, 4])


@st.composite
def attentions(draw):
    """A degree, and numbers of heads that can be split: fewer key heads than ranks, as many, or more."""
    degree = draw(DEGREES)
    keys = draw(st.sampled_from([each for each in (1, 2, 3, 4, 6, 8) if degree % each == 0 or each % degree == 0]))
    queries = math.lcm(keys, degree) * draw(st.integers(1, 2))
    heads = {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": draw(st.sampled_from([2, 3]))}
    return degree, heads


@given(attentions(), st.booleans(), st.booleans(), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_attention_is_as_in_vllm(attention, bias, fused_on_disk, world):
    degree, heads = attention
    config = config_of(**heads)
    multiple = 8 * degree
    shapes = shapes_of(config, bias=bias, qk_norm=True, fused_on_disk=fused_on_disk, layers=1)
    check(shapes, config, degree, world=world, vocabulary_multiple=multiple)


@given(DEGREES, st.integers(1, 200), st.sampled_from([1, 2, 5, 64]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_vocabulary_is_padded_with_zeros_as_in_vllm(degree, vocabulary, multiple, tied):
    config = config_of(num_attention_heads=12, num_key_value_heads=12, vocab_size=vocabulary, tie_word_embeddings=tied)
    shapes = shapes_of(config, layers=1)
    check(shapes, config, degree, vocabulary_multiple=multiple * degree)


@given(DEGREES, st.integers(4, 9), st.sampled_from(["qwen3_moe", "mixtral", "transformers5"]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_experts_are_stacked_as_in_vllm(degree, experts, mlp, expert_parallel):
    config = config_of(
        num_attention_heads=12, num_key_value_heads=12, num_experts=experts, moe_intermediate_size=2 * degree
    )
    shapes = shapes_of(config, mlp=mlp, layers=1)
    check(shapes, config, degree, vocabulary_multiple=64 * degree, expert_parallel=expert_parallel)


def test_layers_with_fused_projections_on_disk_are_split_as_in_vllm():
    config = config_of()
    check(shapes_of(config, fused_on_disk=True, mlp="phi3"), config, 2)


def test_shared_experts_are_split_in_tensor_and_expert_parallelism():
    config = config_of(num_experts=3, moe_intermediate_size=4)
    shapes = shapes_of(config, mlp="qwen3_moe", layers=1)
    base = "model.layers.0.mlp"
    shapes |= {f"{base}.shared_expert.{each}_proj.weight": (8, HIDDEN) for each in ("gate", "up")}
    shapes |= {f"{base}.shared_expert.down_proj.weight": (HIDDEN, 8), f"{base}.shared_expert_gate.weight": (1, HIDDEN)}
    layout = weights.tensor_parallel(infos_of(shapes), config, 2, expert_parallel=True)
    held = {name: local.shape for name, local in layout.ranks[1].items() if ".mlp." in name}
    assert held == {
        f"{base}.experts.w13_weight": (1, 8, HIDDEN),
        f"{base}.experts.w2_weight": (1, HIDDEN, 4),
        f"{base}.gate.weight": (3, HIDDEN),
        f"{base}.shared_expert.gate_up_proj.weight": (8, HIDDEN),
        f"{base}.shared_expert.down_proj.weight": (HIDDEN, 4),
        f"{base}.shared_expert_gate.weight": (1, HIDDEN),
    }


class Settings:
    """A config with attributes, as in Transformers."""

    def __init__(self, **settings):
        self.__dict__ |= settings


def test_without_fusion_names_and_splits_are_those_of_transformers():
    config = config_of(num_experts=4, moe_intermediate_size=4)
    shapes = shapes_of(config, bias=True, mlp="transformers5", layers=1)
    full = values_of(shapes)
    layout = weights.tensor_parallel(infos_of(shapes), Settings(**config), 2, fused=False)
    whole = "embed_tokens.weight", "norm.weight", "mlp.gate.weight", "o_proj.bias"
    for rank in range(2):
        theirs = {}
        for name, tensor in full.items():
            if name.endswith(whole):
                theirs[name] = tensor
            elif name.endswith("gate_up_proj"):
                theirs[name] = torch.cat([each.chunk(2, 1)[rank] for each in tensor.chunk(2, 1)], 1)
            else:
                dim = -1 if "o_proj" in name or "down_proj" in name else 0
                theirs[name] = tensor.chunk(2, dim)[rank]
        theirs = {name: each for name, each in theirs.items() if "layernorm" not in name}
        ours = assemble(layout, rank, full)
        norms = {name: ours.pop(name) for name in [*ours] if "layernorm" in name}
        assert_equal(ours, theirs)
        assert_equal(norms, {name: full[name] for name in full if "layernorm" in name})


def test_without_fusion_projections_that_are_fused_on_disk_are_split_as_one():
    config = config_of()
    shapes = shapes_of(config, fused_on_disk=True, mlp="phi3", layers=1)
    full = values_of(shapes)
    layout = weights.tensor_parallel(infos_of(shapes), config, 2, fused=False)
    for rank in range(2):
        ours = assemble(layout, rank, full)
        for name in ("model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"):
            assert torch.equal(ours[name], full[name].chunk(2)[rank])


TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("first", sorted([*TIED, *TIED.values()]))
def test_tied_embeddings_are_sent_once(first):
    """Whichever of the names comes first in the trainer's state dict."""
    config = config_of(tie_word_embeddings=True)
    infos = infos_of(shapes_of(config))
    [embedding] = TIED.values()
    infos[first] = infos.pop(embedding)
    [other] = {*TIED, embedding} - {first}
    source = replace(sharded(infos, 2), ties={other: first})
    target = weights.tensor_parallel(source, config, 2).on([2, 3])
    assert target.ties == TIED
    assert "lm_head.weight" not in target.ranks[2]
    plan = weights.plan_transfer(source, target)
    assert_minimal(plan, target)
    assert sum(each.box.numel for each in plan.transfers if each.name == first) == 100 * HIDDEN


def test_a_head_that_is_tied_only_at_the_trainer_is_a_tensor_of_its_own():
    config = config_of(tie_word_embeddings=True)
    source = replace(sharded(infos_of(shapes_of(config)), 2), ties=TIED)
    target = weights.tensor_parallel(source, {**config, "tie_word_embeddings": False}, 2).on([2, 3])
    assert target.ties == {}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(target.ranks[2])
    weights.plan_transfer(source, target)


def test_a_head_that_is_tied_only_at_the_engine_is_an_error():
    """The trainer's head may have other values."""
    config = config_of()
    source = sharded(infos_of(shapes_of(config)), 2)
    target = weights.tensor_parallel(source, {**config, "tie_word_embeddings": True}, 2).on([2, 3])
    with pytest.raises(LayoutMismatchError, match=r"lm_head\.weight: no receiver takes it"):
        weights.plan_transfer(source, target)


def test_without_fusion_a_tied_embedding_is_split():
    config = config_of(tie_word_embeddings=True)
    layout = weights.tensor_parallel(infos_of(shapes_of(config)), config, 2, fused=False)
    assert layout.ranks[0]["model.embed_tokens.weight"].shape == (50, HIDDEN)


def test_dtypes_are_those_of_the_engine():
    config = config_of(num_experts=2, moe_intermediate_size=4)
    shapes = shapes_of(config, mlp="mixtral", layers=1)
    dtypes = {"*.gate.weight": torch.float32, "*": torch.bfloat16}
    held = weights.tensor_parallel(infos_of(shapes, torch.float64), config, 2, dtype=dtypes).ranks[0]
    assert held.pop("model.layers.0.block_sparse_moe.gate.weight").dtype == torch.float32
    assert {local.dtype for local in held.values()} == {torch.bfloat16}


def test_rules_declare_other_names_and_leave_tensors_out():
    config = config_of()
    shapes = shapes_of(config, layers=2) | {
        "model.layers.0.mixer.in_proj.weight": (8, 4),
        "model.layers.0.mixer.in_proj.bias": (8,),
        "model.layers.0.mixer.out_proj.weight": (4, 8),
        "model.layers.0.mixer.out_proj.bias": (4,),
        "model.layers.0.mixer.A": (),
        "model.positions.weight": (60, 4),
    }
    rules = {
        "*.mixer.in_proj.*": "columns",
        "*.mixer.out_proj.*": "rows",
        "*.mixer.A": "whole",
        "*.positions.*": "vocabulary",
        "model.layers.1.*": None,
    }
    engine = "engine."
    layout = weights.tensor_parallel(
        infos_of(shapes), config, 2, rules=rules, rename=lambda name: f"{engine}{name.removeprefix('model.')}"
    )
    held = {name: local.shape for name, local in layout.ranks[1].items()}
    assert held["engine.layers.0.mixer.in_proj.weight"] == (4, 4)
    assert held["engine.layers.0.mixer.in_proj.bias"] == (4,)
    assert held["engine.layers.0.mixer.out_proj.weight"] == (4, 4)
    assert held["engine.layers.0.mixer.out_proj.bias"] == (4,)
    assert held["engine.layers.0.mixer.A"] == ()
    assert held["engine.positions.weight"] == (32, 4)
    assert not [name for name in [*held, *layout.tensors] if ".layers.1." in name]
    assert not [problem for local in layout.ranks[1].values() for problem in local.problems()]


def error_of(shapes, config=None, degree=2, **options):
    with pytest.raises(ShardConfigValueError) as caught:
        weights.tensor_parallel(infos_of(shapes), config or config_of(), degree, **options)
    return str(caught.value)


def test_all_problems_are_listed_in_one_error():
    config = config_of(intermediate_size=10, vocab_size=64, num_experts=3, moe_intermediate_size=6)
    shapes = shapes_of(config, mlp="qwen3_moe") | {
        "model.layers.0.self_attn.sinks": (4,),
        "model.layers.1.self_attn.q_proj.weight_scale_inv": (1, 1),
        "model.layers.1.self_attn.q_norm.weight": (24,),
        "visual.blocks.0.attn.qkv.weight": (36, HIDDEN),
    }
    del shapes["model.layers.0.mlp.experts.1.up_proj.weight"]
    shapes["model.layers.1.mlp.down_proj.weight"] = (HIDDEN, 10)
    text = error_of(shapes, config, 4, vocabulary_multiple=2, rules={"*.nothing": "diagonal"})
    text += error_of(shapes_of(config), {**config, "num_key_value_heads": 3}, 4)
    for expected in (
        "tensors: cannot be split over 4 ranks: ",
        "model.layers.*.self_attn.sinks has an unknown name; declare it with rules={'model.layers.*.self_attn.sinks': ",
        "model.layers.*.self_attn.q_proj.weight_scale_inv belongs to a quantized weight",
        "visual.blocks.*.attn.qkv.weight has an unknown name",
        "model.layers.*.self_attn.q_norm.weight has shape (24,), which is not one head of 6; declare it with rules=",
        "model.layers.*.mlp.experts: some experts do not have gate_proj, up_proj and down_proj",
        "model.layers.*.mlp.down_proj.weight: 10 cannot be divided by 4",
        "'*.nothing' has the rule 'diagonal', which is none of columns, rows, vocabulary, whole and None",
        "config: 3 key and value heads cannot be split over 4 ranks",
        "model.layers.*.mlp.experts.*.gate_proj.weight: 6 cannot be divided by 4",
    ):
        assert expected in text


WRONG = {
    "heads": (config_of(num_attention_heads=3), {}, "config: 3 attention heads cannot be divided by 2"),
    "no heads": ({"vocab_size": 100}, {}, "config: has no number for num_attention_heads, "),
    "rows": ({**config_of(), "head_dim": 3}, {}, r"q_proj.weight has 24 rows, but the config means 12"),
    "columns": ({**config_of(), "v_head_dim": 3}, {}, r"o_proj.weight has 24 columns, but the config means 12"),
    "vocabulary": (
        {**config_of(), "vocab_size": 99},
        {},
        "embed_tokens.weight has 100 rows, but config.vocab_size is 99",
    ),
    "padding": (config_of(), {"vocabulary_multiple": 5, "degree": 2}, None),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_does_not_match_is_an_error(case):
    config, options, expected = WRONG[case]
    shapes = shapes_of(config if case == "heads" else config_of())
    if expected is None:  # 100 is a multiple of 5 and can be divided by 2
        weights.tensor_parallel(infos_of(shapes), config, **options)
        expected, options = "100 (padded to 105) cannot be divided by 2", {"vocabulary_multiple": 35}
    assert expected in error_of(shapes, config, **options)


def changed(remove=(), **shapes):
    base = "model.layers.0"
    names = shapes_of(config_of(), bias=True, layers=1)
    for each in remove:
        del names[f"{base}.{each}"]
    return names | {f"{base}.{name.replace('__', '.')}": shape for name, shape in shapes.items()}


SHAPES = {
    "one projection is missing": (
        changed(remove=["self_attn.k_proj.bias"]),
        "self_attn has q_proj, v_proj with a bias, but must have qkv_proj or q_proj, k_proj, v_proj",
    ),
    "gate without up": (
        changed(remove=["mlp.up_proj.weight"]),
        "mlp has gate_proj with a weight, but must have gate_up",
    ),
    "odd": (
        changed(["mlp.up_proj.weight", "mlp.gate_proj.weight"], mlp__gate_up_proj__weight=(5, HIDDEN)),
        "mlp.gate_up_proj.weight has an odd number of rows, 5",
    ),
    "other widths": (
        changed(mlp__up_proj__weight=(24, 7)),
        "mlp.gate_up_proj.weight: the tensors in it have different shapes",
    ),
    "dims": (changed(self_attn__o_proj__weight=(HIDDEN,)), "o_proj.weight has shape (12,), but should have 2 dims"),
    "one stack": (changed(mlp__experts__down_proj=(2, HIDDEN, 4)), "there must be gate_up_proj and down_proj"),
    "transposed": (
        changed(mlp__experts__down_proj=(2, 4, HIDDEN), mlp__experts__gate_up_proj=(2, HIDDEN, 8)),
        "the experts may be transposed",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_tensors_that_do_not_belong_together_are_an_error(case):
    shapes, expected = SHAPES[case]
    assert expected in error_of(shapes)


def test_tensors_that_cannot_be_combined_are_an_error():
    config = config_of(num_experts=2, moe_intermediate_size=12)
    shapes = shapes_of(config, mlp="qwen3_moe", layers=1)
    assert "2 experts cannot be distributed over 3 ranks" in error_of(
        shapes, {**config, "num_attention_heads": 3}, 3, expert_parallel=True
    )
    assert "there are 2 experts, but the config means 4" in error_of(shapes, {**config, "num_experts": 4})
    assert "only experts" in error_of(shapes, config, expert_parallel=True, fused=False)
    assert "2 key and value heads cannot be split over 4" in error_of(shapes, config, 4, fused=False)
    assert "tensors get the name same" in error_of(shapes, config, rename=lambda name: "same")
    assert "degree: must be at least 1; got 0" in error_of(shapes, config, 0)
    infos = infos_of(shapes)
    infos["model.layers.0.self_attn.k_proj.weight"] = TensorInfo((12, HIDDEN), torch.bfloat16)
    infos["model.norm.weight"] = TensorInfo((HIDDEN,), torch.float8_e4m3fn)
    with pytest.raises(ShardConfigValueError, match=r"are parts of one tensor, but have dtypes") as caught:
        weights.tensor_parallel(infos, config, 2)
    assert "model.norm.weight has dtype torch.float8_e4m3fn" in str(caught.value)


# ---- hub names


def stacks(count, inner, layers=2):
    config = config_of(num_experts=count, moe_intermediate_size=inner)
    return config, infos_of(shapes_of(config, mlp="transformers5", layers=layers))


def unstacked(full, style):
    """Full tensors by hub name."""
    block, gate, up, down = {
        "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
        "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    }[style]
    result = {}
    for name, tensor in full.items():
        hub = name.replace(".mlp.", f".{block}.")
        if name.endswith("experts.gate_up_proj"):
            base = hub.removesuffix(".gate_up_proj")
            for expert, matrix in enumerate(tensor):
                result[f"{base}.{expert}.{gate}.weight"], result[f"{base}.{expert}.{up}.weight"] = matrix.chunk(2)
        elif name.endswith("experts.down_proj"):
            base = hub.removesuffix(".down_proj")
            result |= {f"{base}.{expert}.{down}.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            result[hub] = tensor
    return result


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from(["qwen3_moe", "mixtral"]),
)
@settings(max_examples=40, deadline=None)
def test_pieces_with_hub_names_are_views_of_the_stacks_in_any_sharding(count, inner, world, dim, style):
    _, infos = stacks(count, inner, layers=1)
    source = sharded(infos, world, lambda name, shape: min(dim, len(shape) - 1))
    renamed = weights.hub_names(source, style)
    full = values_of({name: info.shape for name, info in infos.items()})
    wanted = unstacked(full, style)
    assert {name: info.shape for name, info in renamed.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in wanted.items()
    }
    seen = {name: torch.full(tensor.shape, torch.nan) for name, tensor in wanted.items()}
    for rank, held in renamed.ranks.items():
        assert {key: local.shape for key, local in held.items()} == {
            key: local.shape for key, local in source.ranks[rank].items()
        }
        tensors = assemble(source, rank, full)
        parts = Parts(tensors, held)
        for local in held.values():
            assert not [*local.problems()]
            for name, box, _ in local.pieces:
                [view] = parts.of(name, box)
                target = seen[name][box.slices(whole_box(seen[name].shape))]
                assert torch.isnan(target).all()
                target.copy_(view)
    assert_equal(seen, wanted)


@pytest.mark.parametrize("style", ["qwen3_moe", "mixtral"])
def test_stacked_experts_are_sent_to_an_engine(style):
    """Under hub names, and under their own ones, with the same result."""
    config, infos = stacks(3, 4)
    source = sharded(infos, 4, lambda name, shape: len(shape) // 3)
    full = values_of({name: info.shape for name, info in infos.items()})
    renamed = weights.hub_names(source, style)
    target = weights.tensor_parallel(renamed, config, 2).on([4, 5])
    assert_minimal(weights.plan_transfer(renamed, target), target)
    direct = weights.tensor_parallel(source, config, 2)
    for rank in range(2):
        ours = assemble(target, rank + 4, unstacked(full, style))
        assert_equal(ours, load(unstacked(full, style), config, rank, 2))
        block = "block_sparse_moe" if style == "mixtral" else "mlp"
        theirs = assemble(direct, rank, full)
        assert_equal(ours, {name.replace(".mlp.", f".{block}."): tensor for name, tensor in theirs.items()})


def test_a_stack_is_not_cut_at_experts_if_the_engine_gets_it_as_a_stack():
    config, infos = stacks(4, 4, layers=1)
    for expert_parallel, count in ((False, 4), (True, 2)):
        held = weights.tensor_parallel(infos, config, 2, expert_parallel=expert_parallel).ranks[1]
        pieces = held["model.layers.0.mlp.experts.w13_weight"].pieces
        assert [piece.box.shape[0] for piece in pieces] == [count, count]


def test_layouts_without_stacked_experts_keep_their_names():
    layout = sharded(infos_of(shapes_of(config_of())), 2)
    assert weights.hub_names(layout, "llama") is layout


def test_stacks_of_another_form_have_no_hub_names():
    base = "model.layers.0.mlp.experts"
    infos = infos_of(
        {
            f"{base}.gate_up_proj": (2, HIDDEN, 8),
            f"{base}.gate_up_proj_bias": (2, 8),
            f"{base}.down_proj": (2, 4, HIDDEN),
            "model.layers.1.mlp.experts.up_proj": (2, 4, HIDDEN),
            "model.layers.2.mlp.experts.down_proj": (2, 4, HIDDEN),
        }
    )
    held = {
        f"{base}.down_proj": LocalTensor(
            (8,), torch.float32, (Piece(f"{base}.down_proj", Box((0, 0, 0), (1, 1, 8)), (0,)),)
        )
    }
    layout = WeightLayout(infos, {"other": f"{base}.down_proj"}, {0: held})
    with pytest.raises(ShardConfigValueError) as caught:
        weights.hub_names(layout, "gpt_oss")
    for expected in (
        "layout: its experts have no hub names: model_type 'gpt_oss' is not one of ",
        f"{base}.gate_up_proj_bias is neither gate_up_proj nor down_proj",
        f"{base} has stacks of another form: gate_up_proj has shape (2, 12, 8) and down_proj (2, 4, 12)",
        "model.layers.1.mlp.experts.up_proj is neither",
        "model.layers.2.mlp.experts has only one of gate_up_proj and down_proj",
        f"other is tied to {base}.down_proj",
        f"{base}.down_proj has 1 dims, but contains a part of a stack of experts",
    ):
        assert expected in str(caught.value)


def test_hub_names_keep_the_adapter_that_is_merged():
    shape = {"experts.gate_up_proj": (2, 8, 3), "experts.down_proj": (2, 3, 4)}
    infos = {f"model.layers.0.mlp.{name}": TensorInfo(each, torch.float32) for name, each in shape.items()}
    assert weights.hub_names(WeightLayout(infos, merges="default"), "qwen3_moe").merges == "default"
