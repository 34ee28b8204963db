"""The planner on linear layers in float8 and MXFP8, and on compiled blocks: bytes, times, memory, errors, commands."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import composable_shard as cs
from composable_shard.cli.main import main
from composable_shard.planner import KNOWN, Layout, Link, Shape, Strategy, advise, text
from composable_shard.planner.advise import Planner
from composable_shard.planner.decoder import Decoder
from composable_shard.planner.linear import LINEAR_FORMATS, convert_layers
from composable_shard.planner.precision import precision_of
from composable_shard.planner.profile import BACKWARD, FORWARD, FUSED, Work, materialize, profile
from composable_shard.planner.rehearsal import rehearse_source
from composable_shard.planner.sources import source_of
from composable_shard.planner.timing import scales_of

SMALL = Shape(layers=5, width=64, heads=4, vocabulary=256, sequence=64, key_value_heads=2, hidden=256)
MATRICES = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256  # numbers in the linear layers of a block
NORMS = 2 * 64
MIXED, TENSORWISE = "bfloat16-mixed", "float8_tensorwise"
ZERO3 = Strategy("zero3", Layout(1, 4))
SHAPE = "layers=2,width=64,heads=4,vocabulary=256,sequence=64,hidden=256"


def planner_of(form, shape=SMALL, **settings):
    return Planner(source_of(shape), precision_of(MIXED, form), 1, **settings)


# ---------------------------------------------------------------------- gathers


@pytest.mark.parametrize(
    ("form", "nbytes"),
    [
        (None, 2 * (MATRICES + NORMS)),
        (TENSORWISE, MATRICES + 2 * NORMS),
        ("float8_rowwise", 2 * (MATRICES + NORMS)),
        ("mxfp8", 2 * (MATRICES + NORMS)),
    ],
)
def test_only_tensorwise_weights_of_blocks_are_gathered_in_one_byte(form, nbytes):
    root, *blocks = source_of(SMALL).plan(precision_of(MIXED, form)).groups
    assert [sum(block.moved.gather) for block in blocks] == [nbytes] * 5
    assert sum(root.moved.gather) == 2 * (2 * 256 * 64 + 64)  # embedding, head and norm
    assert {block.moved.reduce for block in blocks} == {(246_368,)}  # gradients stay in float32, with gaps


def test_layers_that_hardware_cannot_multiply_in_8_bits_keep_their_dtype():
    odd = replace(SMALL, hidden=200)  # not a multiple of 16
    _, block, *_ = source_of(odd).plan(precision_of(MIXED, TENSORWISE)).groups
    in_float8 = {each.fqn.rpartition(".layer")[0] for each in block.params if each.gathered.itemsize == 1}
    assert len(in_float8) == 1
    assert sum(each.numel for each in block.params if each.gathered.itemsize == 1) == 2 * 64 * 64 + 2 * 64 * 32


def test_a_step_sends_half_of_the_weights_and_one_number_per_weight():
    plain, low = (planner_of(form).estimate(ZERO3, KNOWN["h100"]).moved for form in (None, TENSORWISE))
    scales = 2 * 4 * 7 * 5 * 3 // 4  # an all-reduce over 4 ranks of a float32 of each of 7 weights of 5 blocks
    assert plain - low == 2 * 5 * MATRICES * 3 // 4 - scales  # each block is gathered twice


def test_the_scales_of_all_weights_take_one_all_reduce_and_a_read_of_the_shards():
    machine = replace(KNOWN["h100"], memory_bandwidth=1e9, intra_node=Link(1e9, 1e-3))
    plan = source_of(SMALL).plan(precision_of(MIXED, TENSORWISE))
    found = scales_of(plan, ZERO3, machine)
    assert found.sent == 210
    assert found.seconds == pytest.approx(1e-3 + 210e-9 + 4 * 5 * MATRICES / 4 / 1e9)
    assert scales_of(source_of(SMALL).plan(precision_of(MIXED)), ZERO3, machine).seconds == 0
    assert scales_of(None, ZERO3, machine).sent == 0


def test_gathered_weights_take_half_of_the_memory():
    zero1 = Strategy("zero1", Layout(1, 4))  # all weights stay unsharded
    plain, low = (planner_of(form).estimate(zero1, KNOWN["h100"]).memory.most for form in (None, TENSORWISE))
    of_block = 123_392 - (MATRICES + 512 + 512)  # slots are multiples of 512 bytes, with marks; norms have their own
    assert plain.unsharded - low.unsharded == 5 * of_block
    assert plain.parameters == low.parameters
    assert plain.optimizer == low.optimizer


# ---------------------------------------------------------------------- time


def test_products_of_linear_layers_run_at_the_rate_of_the_format():
    rates = {"float32": 1e9, "bfloat16": 1e9, "float8": 2e9, "mxfp8": 4e9}
    machine = replace(KNOWN["h100"], flops=rates, memory_bandwidth=1e18, launch=0.0)
    tokens = SMALL.sequence
    linear = 6 * tokens * 5 * MATRICES
    others = 6 * tokens * 256 * 64 + 3.5 * 4 * SMALL.sequence * 64 * 5 * tokens  # the head, and attention
    for form, rate in ((None, 1e9), (TENSORWISE, 2e9), ("float8_rowwise", 2e9), ("mxfp8", 4e9)):
        time = planner_of(form).estimate(ZERO3, machine).time
        assert time.compute == pytest.approx(others / 1e9 + linear / rate, rel=1e-6)


def work_of(model, x, **settings):
    """Operators by direction of a sharded module in fake tensors, in a mode that is already active."""
    tokens = x.shape[0]
    traced = profile(model, {"0": model[0]}, lambda: model(x).square().sum(), tokens, **settings)
    return {
        direction: [
            work
            for segment in traced.segments
            for work, count in segment.work.items()
            for _ in range(count)
            if (segment.direction, segment.group) == (direction, "0")
        ]
        for direction in (FORWARD, BACKWARD)
    }


def test_casts_of_a_compiled_layer_read_each_tensor_twice_and_write_one_byte_per_number():
    rows, columns, results = 128, 64, 256
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(columns, results, bias=False))
        materialize(model, torch.bfloat16)
        convert_layers([model], LINEAR_FORMATS[TENSORWISE], shards=True, traces=True)
        x = torch.ones(rows, columns, dtype=torch.bfloat16, requires_grad=True)
        work = work_of(model, x, compiles=True)
    inputs, outputs, weight = rows * columns, rows * results, columns * results
    fused = {way: sum(each.nbytes for each in work[way] if each.dtype == FUSED) for way in work}
    scales = 100  # more bytes than scales have
    assert 0 <= fused[FORWARD] - (2 + 3) * inputs < scales
    # The gradient is cast in both orders. The weight has arrived in float8, and is only transposed.
    assert 0 <= fused[BACKWARD] - ((2 + 4) * outputs + (2 + 3) * inputs + 2 * weight) < scales
    products = [each for way in work for each in work[way] if each.dtype == "float8"]
    assert [each.flops for each in products] == [2 * rows * columns * results] * 3
    assert 0 <= products[0].nbytes - (inputs + weight + 2 * outputs) < scales


class Pointwise(nn.Module):
    def forward(self, x):
        return (x + 1).mul(2).sub(3)


def test_operators_of_a_compiled_block_are_one_kernel_without_intermediate_results():
    with FakeTensorMode():
        x = torch.ones(1000, 4, requires_grad=True)
        eager, compiled = (work_of(nn.Sequential(Pointwise()), x, compiles=each)[FORWARD] for each in (False, True))
    nbytes = 4 * 4000
    assert eager == [Work(0, 2 * nbytes, "float32")] * 3
    assert compiled == [Work(0, 2 * nbytes, FUSED)]


@pytest.mark.parametrize("form", [None, TENSORWISE])
def test_compiled_blocks_multiply_the_same_and_access_less_memory(form):
    def totals(traced):
        work = [(each, count) for segment in traced.segments for each, count in segment.work.items()]
        return tuple(sum(getattr(each, name) * count for each, count in work) for name in ("flops", "nbytes"))

    source, precision = source_of(SMALL), precision_of(MIXED, form)
    eager, compiled = (source.traced(precision, "selective", 2, compiles=each) for each in (False, True))
    assert totals(eager)[0] == totals(compiled)[0]
    assert totals(compiled)[1] < 0.6 * totals(eager)[1]
    peaks = [max(segment.activations for segment in each.segments) for each in (eager, compiled)]
    assert peaks[1] <= peaks[0]
    whole = source_of(lambda: (Decoder(SMALL), source.step_of_decoder), SMALL.sequence)
    assert compiled == whole.traced(precision, "selective", 2, compiles=True)  # further blocks equal the second one


# ---------------------------------------------------------------------- rehearsals


def compare(strategy, form):
    source, precision = source_of(replace(SMALL, layers=2)), precision_of(MIXED, form)
    machine = replace(KNOWN["b200"], backend="fake")
    estimated = Planner(source, precision, 4).estimate(strategy, machine).memory.peak
    counted = rehearse_source(source, strategy, precision, 4).peak
    assert estimated.parameters == counted.parameters
    assert abs(estimated.total - counted.total) <= 0.05 * counted.total


@pytest.mark.matrix
def test_predicted_memory_of_float8_weights_matches_rehearsed_steps():
    compare(ZERO3, TENSORWISE)


@pytest.mark.parametrize("form", list(LINEAR_FORMATS))
@pytest.mark.parametrize("strategy", [Strategy("zero2", Layout(1, 4), "selective"), Strategy("hsdp", Layout(1, 2, 2))])
@pytest.mark.matrix
def test_predicted_memory_of_every_format_matches_rehearsed_steps(strategy, form):
    compare(strategy, form)


# ---------------------------------------------------------------------- arguments and commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"linear_format": "int9"}, "'int9' is not None or one of float8_tensorwise, float8_rowwise, mxfp8"),
        (
            {"machine": "a100-80gb"},
            "A100 .* has no rate for 'float8_tensorwise'.* add 'float8' to Machine.flops.* h100",
        ),
        ({"linear_format": "mxfp8"}, "H100 .* has no rate for 'mxfp8'.*: b200$"),
        ({"tensor": (1, 2)}, "'float8_tensorwise' cannot be planned with `tensor`"),
        ({"adapters": 4}, "'float8_tensorwise' cannot be planned with `adapters`"),
        ({"comm_policy": cs.CommPolicy("fp8")}, "so comm_policy cannot have gather='fp8'; set gather to None"),
        ({"model": replace(SMALL, width=40, hidden=24)}, "sizes are multiples of 16, but the model has none"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_invalid_settings_of_linear_layers_are_errors(arguments, message):
    with pytest.raises(cs.errors.ShardConfigValueError, match=message):
        advise(**{"model": SMALL, "devices": 2, "linear_format": TENSORWISE, **arguments})


def test_gradients_may_be_sent_in_fewer_bits_with_any_format():
    policy = cs.CommPolicy(reduce="int8")
    assert advise(SMALL, devices=2, linear_format=TENSORWISE, comm_policy=policy).recommended is not None


def test_the_command_names_the_format_and_writes_the_conversion(tmp_path, capsys):
    emitted = tmp_path / "shard.py"
    options = ["--devices", "2", "--linear-format", TENSORWISE, "--compile-blocks"]
    assert main(["advise", SHAPE, *options, "--emit", str(emitted)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "the shape, bfloat16-mixed, linear layers in float8_tensorwise, compiled blocks, 128 tokens"
    )
    lines = emitted.read_text().splitlines()
    assert "config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)" in lines
    order = [next(i for i, line in enumerate(lines) if part in line) for part in ("convert_to", ".compile()", "shard_")]
    assert order == sorted(order)
    assert lines[-1] == "# precompute_float8_dynamic_scale_for_fsdp(model)"
    assert main(["advise", SHAPE, *options, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["linear_format"], answer["compile_blocks"]) == (TENSORWISE, True)
    assert main(["advise", SHAPE, "--devices", "2", "--linear-format", "mxfp8"]) == 2
    assert "has no rate for 'mxfp8'" in capsys.readouterr().err


def test_the_written_conversion_is_valid_python():
    advice = advise(SMALL, devices=1, compile_blocks=True)
    for form in LINEAR_FORMATS:
        written = text.script(replace(advice, linear_format=form), advice.recommended)
        compile(written, "shard.py", "exec")
        assert "from torchao" in written


def test_the_estimate_of_a_model_counts_weights_in_float8(capsys):
    answers = []
    for options in ([], ["--linear-format", TENSORWISE]):
        assert main(["estimate", "--devices", "4", "--strategy", "zero1", "--json", *options, SHAPE]) == 0
        answers.append(json.loads(capsys.readouterr().out)["peak"])
    plain, low = answers
    assert plain["parameters"] == low["parameters"]
    matrices = 4 * 64 * 64 + 3 * 64 * 256
    assert plain["unsharded"] - low["unsharded"] == pytest.approx(2 * matrices, rel=0.02)
