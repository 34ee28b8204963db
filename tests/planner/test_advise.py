"""The planner: shapes, traces, predicted memory and real steps, predicted times and formulas, and recommendations."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import types
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import composable_shard as cs
from _blocks import Transformer, next_token_loss
from _pool import more
from composable_shard.cli.main import main
from composable_shard.cli.terminal import size
from composable_shard.planner import KNOWN, NAMED, Layout, Link, Machine, Shape, Strategy, advise, strategies, text
from composable_shard.planner.advise import Planner
from composable_shard.planner.decoder import Decoder
from composable_shard.planner.precision import PRECISIONS
from composable_shard.planner.profile import BACKWARD, FORWARD, materialize, profile
from composable_shard.planner.rehearsal import rehearse_source
from composable_shard.planner.sources import source_of
from composable_shard.planner.timing import ring, sent

SMALL = Shape(layers=5, width=64, heads=4, vocabulary=256, sequence=64, key_value_heads=2)
PLAYED = replace(KNOWN["h100"], backend="fake")


def build():
    """A model that is not one of the planner's."""
    return Transformer(dropout=0.1), lambda model, sequences: next_token_loss(
        model, torch.zeros(sequences, 8, dtype=torch.int64)
    )


# ---------------------------------------------------------------------- shapes


def test_a_shape_has_as_many_parameters_as_its_decoder():
    for shape in (SMALL, replace(SMALL, tied=True), replace(SMALL, head_width=32, hidden=100), NAMED["gpt2-124m"]):
        with FakeTensorMode():
            assert sum(p.numel() for p in Decoder(shape).parameters()) == shape.parameters
    assert round(NAMED["llama3-8b"].parameters / 1e9, 2) == 8.03
    assert round(NAMED["llama3-70b"].parameters / 1e9, 1) == 70.6


def test_shapes_are_parsed_from_text_and_read_from_configurations(tmp_path):
    assert Shape.parse("layers=5,width=64,heads=4,vocabulary=256,sequence=64,key-value-heads=2") == SMALL
    config = {
        "model_type": "llama",
        "num_hidden_layers": 5,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "intermediate_size": 256,
        "max_position_embeddings": 64,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert Shape.from_config(tmp_path) == replace(SMALL, hidden=256)
    assert source_of(str(file), sequence=32).sequence == 32
    file.write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(cs.errors.ShardConfigValueError, match="model_type 'bert'; supported are"):
        Shape.from_config(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "lama"}, "'lama' is not a shape .it is not a known name, .* name=number.* Use one of gpt2-124m"),
        ({"model": "layers=2,width=10,heads=3,vocabulary=9,sequence=8"}, "width=10 is not a multiple of heads=3"),
        ({"model": "no_such_module:build", "sequence": 8}, "cannot be imported: No module named"),
        ({"model": build}, "sequence: give the tokens per sequence"),
        ({"model": nn.Linear(2, 2)}, "give a function that makes the model"),
        ({"machine": "abacus"}, "'abacus' is neither a file nor one of h100"),
        ({"devices": 0}, "devices: 0 is not a number above 0"),
        ({"precision": "int3"}, "'int3' is not one of float32, bfloat16-mixed"),
        ({"tensor": (3,)}, "divides 2 devices"),
        ({"model": lambda: 3, "sequence": 8}, "returned a int; a factory returns an nn.Module"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_invalid_arguments_are_errors(arguments, message):
    with pytest.raises(cs.errors.ShardConfigError, match=message):
        advise(**{"model": SMALL, "devices": 2, **arguments})


@pytest.mark.matrix
def test_low_precision_sends_fewer_bytes_and_is_faster_on_slow_links():
    slow = {"devices": 4, "machine": replace(KNOWN["h100"], intra_node=Link(1e8), inter_node=Link(1e8))}
    policy = cs.CommPolicy("fp8", "int8", "int8")
    exact, low = advise(SMALL, **slow), advise(SMALL, **slow, comm_policy=policy)
    for name in ("zero3", "hsdp"):
        one, two = (
            next(each for each in of.estimates if each.strategy.name == name and not each.strategy.offload)
            for of in (exact, low)
        )
        assert two.moved < 0.5 * one.moved
        assert two.time.exposed < 0.6 * one.time.exposed
        assert two.memory.peak.communication > one.memory.peak.communication  # rounded shards are kept
    assert "bfloat16-mixed (gather fp8, reduce int8, replicas int8)" in text.text(low)
    assert "comm_policy=cs.CommPolicy(gather='fp8'" in text.script(low, low.recommended)


def test_a_machine_can_be_written_to_json_and_read_again(tmp_path):
    machine = replace(KNOWN["h200"], name="ours", backend="gloo", intra_node=Link(3e9, 1e-4))
    assert Machine.from_json(machine.to_json()) == machine
    for damaged in ("{", "[]", '{"machine": 9}', machine.to_json().replace("launch", "lunch")):
        with pytest.raises(cs.errors.ShardConfigValueError, match="not a machine that"):
            Machine.from_json(damaged)
    with pytest.raises(cs.errors.ShardConfigValueError, match="memory_bandwidth=0"):
        replace(machine, memory_bandwidth=0)


# ---------------------------------------------------------------------- traces


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_further_blocks_equal_the_second_block(checkpointing):
    source = source_of(SMALL)
    short = source.traced(PRECISIONS["bfloat16-mixed"], checkpointing, 2)  # of three blocks
    whole = source_of(lambda: (Decoder(SMALL), source.step_of_decoder), SMALL.sequence)
    assert short == whole.traced(PRECISIONS["bfloat16-mixed"], checkpointing, 2)


def flops_of(trace):
    """Floating-point operations of matrix products in forward and backward."""
    return sum(work.flops * count for segment in trace.segments for work, count in segment.work.items())


def test_a_trace_counts_operations_and_saved_activations():
    tokens, products = 2 * SMALL.sequence, SMALL.parameters - SMALL.vocabulary * SMALL.width - 11 * SMALL.width
    attention = 4 * SMALL.sequence * SMALL.width * SMALL.layers * tokens  # scores and sums, without the causal mask
    traces = {kind: source_of(SMALL).traced(PRECISIONS["float32"], kind, 2) for kind in ("none", "selective", "full")}
    flops = {kind: flops_of(trace) for kind, trace in traces.items()}
    assert flops["none"] == 6 * products * tokens + 3.5 * attention
    head = SMALL.vocabulary * SMALL.width
    last = SMALL.layers * SMALL.width * SMALL.feed_forward  # nothing in the block needs this result in backward
    assert flops["full"] == flops["none"] + 2 * (products - head - last) * tokens + attention
    most = {kind: max(segment.activations for segment in trace.segments) for kind, trace in traces.items()}
    assert most["none"] > 1.5 * most["selective"] > 1.5 * most["full"]
    assert flops["none"] < flops["selective"] < flops["full"]
    directions = [segment.direction for segment in traces["none"].segments]
    assert directions == sorted(directions, key=[FORWARD, BACKWARD].index)


def test_gradients_of_tied_parameters_are_not_activations():
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        model[1].weight = model[0].weight
        materialize(model, torch.bfloat16)
        assert model[0].weight is model[1].weight
        traced = profile(model, {}, lambda: model(torch.ones(1, 64, dtype=torch.bfloat16)).sum(), 1)
    assert traced.segments[-1].rests == 0


class HuggingFace(nn.Module):
    """Stands in for a causal model of Transformers: its arguments, and the name of its loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.embed = nn.Embedding(16, 8)

    def forward(self, input_ids, labels=None, use_cache=True, **kwargs):
        assert not use_cache  # the recomputation of a block would extend the cache again
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        if input_ids.diff().ne(1).any() and torch.isnan(hidden.sum()):
            raise ValueError("not a number")
        logits = hidden[input_ids >= 0] @ self.embed.weight.t()
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels.flatten()))


class Adapted(nn.Module):
    """Stands in for a model of PEFT."""

    def __init__(self):
        super().__init__()
        self.inner = HuggingFace()

    def get_base_model(self):
        return self.inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("make", [HuggingFace, Adapted])
def test_language_models_are_called_as_in_training_and_may_read_values(make):
    estimates = advise(make, devices=2, sequence=4, precision="float32").estimates
    assert {each.strategy.checkpointing for each in estimates} == {"none", "selective", "full"}
    assert all(each.memory.peak.activations > 0 for each in estimates)


class Rotated(nn.Module):
    """A block with float32 angles as input, which multiplies a result with a result that depends on them."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden, angles):
        return hidden + (self.query(hidden) * angles) @ self.key(hidden).mT @ hidden


class WithBuffer(nn.Module):
    """A decoder that passes one buffer to all blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Rotated() for _ in range(2))
        self.register_buffer("angles", torch.ones(4, 8))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.angles)
        return self.head(hidden)


class Refuses(WithBuffer):
    """Fails in its forward."""

    def forward(self, tokens):
        raise ValueError("no tokens")


def test_blocks_get_inputs_in_the_compute_dtype_of_mixed_precision():
    estimates = advise(WithBuffer, devices=2, sequence=4, precision="bfloat16-mixed").estimates
    assert {each.strategy.checkpointing for each in estimates} == {"none", "selective", "full"}
    with pytest.raises(RuntimeError, match="scalar type"):  # inputs are not cast if parameters are stored in bfloat16
        advise(WithBuffer, devices=2, sequence=4, precision="bfloat16")


# ---------------------------------------------------------------------- memory

MIDDLE = Shape(layers=4, width=192, heads=6, vocabulary=512, sequence=256, key_value_heads=2)
STRATEGIES = [
    Strategy("zero3", Layout(1, 8)),
    Strategy("zero2", Layout(1, 64), "selective"),
    Strategy("zero1", Layout(1, 8), "full"),
    Strategy("hsdp", Layout(1, 16, 4)),
    Strategy("hfsdp", Layout(1, 8, 8)),
    Strategy("ddp", Layout(1, 1, 8), "selective"),
    Strategy("zero3", Layout(1, 512), "full"),
    Strategy("zero2", Layout(1, 512), "full"),  # its first step needs the most memory
]


def compare(strategy, precision, source=None, sequences=4):
    source = source or source_of(MIDDLE)
    estimated = Planner(source, PRECISIONS[precision], sequences).estimate(strategy, PLAYED).memory.peak
    counted = rehearse_source(source, strategy, PRECISIONS[precision], sequences).peak
    assert estimated.parameters == counted.parameters
    assert abs(estimated.optimizer - counted.optimizer) < 1000  # the step counts of the optimizer
    assert estimated.copies == counted.copies
    assert abs(estimated.total - counted.total) <= 0.05 * counted.total


@pytest.mark.parametrize("strategy", [more(STRATEGIES[0]), Strategy("hfsdp", Layout(1, 4, 2))], ids=str)
def test_predicted_memory_matches_rehearsed_steps(strategy):
    compare(strategy, "bfloat16-mixed", source_of(replace(MIDDLE, layers=2)))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16-mixed"])
@pytest.mark.matrix
def test_predicted_memory_of_every_strategy_matches_rehearsed_steps(strategy, precision):
    compare(strategy, precision)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy("zero3", Layout(2, 4)),
        Strategy("zero2", Layout(2, 8), "selective"),
        Strategy("hsdp", Layout(2, 4, 2), "full"),
    ],
    ids=str,
)
@pytest.mark.matrix
def test_predicted_memory_with_tensor_parallelism_matches_rehearsed_steps(strategy):
    compare(strategy, "float32")


@pytest.mark.matrix
def test_predicted_memory_of_adapters_matches_rehearsed_steps():
    compare(STRATEGIES[0], "bfloat16-mixed", source_of(MIDDLE, adapters=8))


def test_memory_by_category_follows_from_shards():
    planner = Planner(source_of(SMALL), PRECISIONS["bfloat16-mixed"], 1)
    size = 4 * SMALL.parameters
    most = {
        name: planner.estimate(Strategy(name, layout), KNOWN["h100"]).memory.most
        for name, layout in {"none": Layout(), "ddp": Layout(1, 1, 4), "zero3": Layout(1, 4)}.items()
    }
    assert most["none"].parameters == most["ddp"].parameters == size
    assert most["none"].optimizer == 2 * size
    assert most["none"].unsharded == size / 2  # the copies of autocast
    assert most["zero3"].parameters == size / 4
    assert most["zero3"].gradients == size / 4
    offloaded = planner.estimate(Strategy("zero3", Layout(1, 4), offload=True), KNOWN["h100"])
    assert offloaded.memory.most.parameters == offloaded.memory.most.optimizer == 0
    assert offloaded.host_bytes == size


@pytest.mark.matrix
def test_optimizer_state_that_does_not_fit_on_the_host_goes_to_disk(monkeypatch):
    def advice(host, memory=int(1.2e9)):
        return advise(SMALL, devices=2, machine=replace(KNOWN["h100"], memory=memory, host_memory=host))

    size = 4 * SMALL.parameters // 2
    monkeypatch.setattr(strategies, "DISK_MEMORY", size // 4)  # with the default, this small state would be in memory
    everything, alone, none = advice(5 * size), advice(int(2.5 * size)), advice(size)
    names = {str(each.strategy) for each in alone.estimates}
    assert {"zero3", "zero3, offload", "zero3, offload to disk", "zero3, offload of the optimizer"} <= names
    assert not any("disk" in str(each.strategy) for each in advise(SMALL, devices=2).estimates)

    def of(advised, name):
        return next(each for each in advised.estimates if str(each.strategy) == name)

    host, disk = of(alone, "zero3, offload"), of(alone, "zero3, offload to disk")
    assert (host.host_bytes, host.disk_bytes) == (4 * size, 0)
    assert (disk.host_bytes, disk.disk_bytes) == (2 * size + size // 4, 2 * size)
    assert host.memory == disk.memory
    assert disk.time.optimizer == pytest.approx(4 * size / KNOWN["h100"].disk_bandwidth)
    assert disk.time.optimizer > host.time.optimizer
    assert disk.fits
    assert not host.fits
    assert host.host_short == 4 * size - int(2.5 * size)
    assert of(everything, "zero3, offload").fits
    assert not of(none, "zero3, offload to disk").fits
    assert "no, host " in text.text(none, None)
    tight = advice(int(2.5 * size), disk.needed + 1)
    lines = text.script(tight, of(tight, "zero3, offload to disk"))
    assert 'offload_policy=cs.DiskOffloadPolicy("offload", memory=1 << 30)' in lines
    assert lines.endswith("cs.optim.offload_optimizer(optimizer)\n")


# ---------------------------------------------------------------------- time


def test_rings_over_nodes_share_the_network_adapters_of_each_node():
    machine = replace(KNOWN["h100"], intra_node=Link(300e9, 1e-5), inter_node=Link(40e9, 2e-5), devices_per_node=8)
    assert ring(machine, 8, 1) == Link(300e9, 1e-5)
    assert ring(machine, 16, 1).bandwidth == 300e9  # limited by the node; eight network adapters reach 320
    assert ring(machine, 16, 1).latency == pytest.approx(3e-5)
    assert ring(machine, 4, 8).bandwidth == 40e9  # replicas, one per node
    assert ring(machine, 4, 8).latency == pytest.approx(6e-5)
    assert ring(machine, 8, 4).bandwidth == 80e9  # two per node
    assert sent(Link(10.0, 1.0), 4, 40.0) == 1.0 + 0.75 * 4.0
    assert sent(Link(10.0, 1.0), 1, 40.0) == 0.0


def test_times_follow_the_roofline_and_the_network():
    planner = Planner(source_of(SMALL), PRECISIONS["float32"], 1)
    slow = replace(PLAYED, flops={"float32": 1e9}, memory_bandwidth=1e15, launch=0.0, intra_node=Link(1e15, 0.0))
    estimate = planner.estimate(Strategy("zero3", Layout(1, 4)), slow)
    traced = source_of(SMALL).traced(PRECISIONS["float32"], "none", 1)
    assert math.isclose(estimate.time.compute, flops_of(traced) / 1e9, rel_tol=1e-3)
    assert estimate.exposed_share < 1e-3
    linked = planner.estimate(Strategy("zero3", Layout(1, 4)), replace(slow, intra_node=Link(1e6, 0.0)))
    at_least = 0.75 * 3 * 4 * SMALL.parameters / 1e6 - estimate.time.compute
    assert linked.time.exposed > 0.8 * at_least
    assert linked.moved == pytest.approx(0.75 * 3 * 4 * SMALL.parameters, rel=0.1)
    launched = planner.estimate(Strategy("none", Layout()), replace(slow, flops={"float32": 1e18}, launch=1.0))
    assert launched.time.compute == sum(segment.work.total() for segment in traced.segments)


@pytest.mark.matrix
def test_hsdp_and_hfsdp_are_faster_if_the_network_between_nodes_is_slow():
    wide = Shape(3, 2048, 16, 4096, 256)
    slow = advise(wide, devices=16, machine=replace(KNOWN["a100-80gb"], inter_node=Link(1e9)), batch=8)
    best = {each.strategy.name: each for each in reversed(slow.estimates) if each.fits}
    assert best["hsdp"].tokens_per_second > 1.2 * best["zero3"].tokens_per_second
    assert best["hfsdp"].tokens_per_second > 1.05 * best["hsdp"].tokens_per_second  # it sends fewer bytes between nodes
    assert slow.recommended.strategy.name == "hfsdp"
    assert slow.recommended.strategy.layout.shard == 8


# ---------------------------------------------------------------------- advice


def test_advice_as_text():
    assert_expected_inline(
        text.text(advise(replace(SMALL, width=1024, vocabulary=32000), devices=2, machine="rtx4090", batch=16), 6),
        """\
the shape, bfloat16-mixed, 2,048 tokens per step on 2 devices (RTX 4090 24 GB, PCIe 4.0, 25 Gb/s, 23.0 GiB each)

strategy                        fits  memory  params  optimizer  grads  activ.  unsharded      step  tokens/s  exposed
zero2                           yes     1.80    0.23       0.46   0.23    0.62       0.25  0.0251 s    81,586    48.7%
zero1                           yes     2.02    0.23       0.46   0.23    0.62       0.48  0.0251 s    81,586    48.7%
zero1, selective checkpointing  yes     1.85    0.23       0.46   0.23    0.45       0.48  0.0254 s    80,694    43.8%
zero2, selective checkpointing  yes     1.63    0.23       0.46   0.23    0.45       0.25  0.0254 s    80,694    43.8%
zero1, full checkpointing       yes     1.79    0.23       0.46   0.23    0.39       0.48  0.0259 s    79,219    42.8%
zero2, full checkpointing       yes     1.57    0.23       0.46   0.23    0.39       0.25  0.0259 s    79,219    42.8%

memory in GiB per device, maximum of each category; exposed: share of a step that is exposed communication

Use zero2. It needs 1.8 GiB per device and reaches 81,586 tokens/s; 49% of a step is exposed communication.
The best alternative, zero1, reaches 100% of this throughput.""",
    )


def test_a_model_that_fits_on_one_device_is_not_sharded():
    assert advise(SMALL, devices=1, batch=64).reason.startswith("Do not shard: the model fits on one device")
    assert advise(SMALL, devices=2, batch=64).reason.startswith("Do not shard parameters, replicate them")


@pytest.mark.matrix
def test_a_model_that_barely_fits_is_sharded_and_missing_memory_is_reported():
    wide = Shape(3, 1024, 8, 1024, 64)
    free = advise(wide, devices=4, machine="rtx4090")
    smallest = min((each for each in free.estimates if not each.strategy.offload), key=lambda each: each.needed)
    tight = advise(wide, devices=4, machine=replace(KNOWN["rtx4090"], memory=smallest.needed))
    assert tight.recommended.needed == smallest.needed
    assert tight.recommended.strategy.checkpointing == "full"
    assert "would be simpler but needs" in tight.reason
    nothing = advise(wide, devices=1, machine=replace(KNOWN["rtx4090"], memory=1 << 20))
    assert nothing.recommended is None
    assert nothing.reason.startswith("Nothing fits.")


def test_a_custom_model_is_planned():
    advice = advise(build, devices=4, machine="h100", sequence=8, precision="float32")
    assert {each.strategy.name for each in advice.estimates} == {"ddp", "zero1", "zero2", "zero3", "hsdp"}
    assert all(each.memory.most.activations > 0 for each in advice.estimates)


@pytest.mark.matrix
def test_tensor_parallelism_shards_parameters_and_adds_communication():
    advice = advise(SMALL, devices=4, tensor=(1, 2), precision="float32")
    plain, parallel = (
        next(e for e in advice.estimates if e.strategy.layout == layout and e.strategy.checkpointing == "none")
        for layout in (Layout(1, 4), Layout(2, 2))
    )
    assert parallel.memory.most.parameters == pytest.approx(plain.memory.most.parameters, rel=0.02)
    assert parallel.time.compute > plain.time.compute  # it has collectives


# ---------------------------------------------------------------------- the command


def test_the_command_prints_json_and_writes_a_script_that_runs(tmp_path, capsys):
    emitted = tmp_path / "shard.py"
    shape = "layers=3,width=64,heads=4,vocabulary=256,sequence=32"
    values = ["--memory=30MiB", "--host-memory=1GiB", "--disk=1GB", "--intra-node=2GB", "--inter-node=3GB"]
    code = main(["advise", shape, "--devices", "2", *values, "--json", "--emit", str(emitted)])
    answer = json.loads(capsys.readouterr().out)
    assert code == 0
    machine = answer["machine"]
    assert (machine["memory"], machine["host_memory"], machine["disk_bandwidth"]) == (30 << 20, 1 << 30, 10**9)
    for name, bandwidth in (("intra_node", 2 * 10**9), ("inter_node", 3 * 10**9)):
        assert machine[name] == {"bandwidth": bandwidth, "latency": getattr(KNOWN["h100"], name).latency}
    assert answer["recommended"]["fits"] is True
    assert answer["recommended"]["needed_bytes"] <= 30 << 20
    lines = emitted.read_text()
    with cs_world():
        names = {"model": Decoder(Shape.parse(shape))}
        exec(compile(lines, str(emitted), "exec"), names)
        assert isinstance(names["optimizer"], torch.optim.AdamW)


def test_a_terminal_shows_the_same_cells_as_plain_text(capsys, monkeypatch):
    arguments = ["advise", "layers=1,width=64,heads=4,vocabulary=256,sequence=32", "--devices", "2", "--all"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(arguments) == 0
    drawn = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert {"─", text.NOTE.partition(";")[0]} <= {*drawn, *re.findall("memory in GiB[^;]*", drawn)}
    cells = [re.split(" {2,}", line.strip()) for line in plain.splitlines()]
    shown = [re.split(" {2,}", line.strip()) for line in drawn.splitlines()]
    assert [row for row in shown if len(row) == len(text.HEAD)] == [row for row in cells if len(row) == len(text.HEAD)]


def cs_world():
    from composable_shard import testing

    return testing.fake(2)


def test_the_command_reports_errors_in_one_line(capsys):
    assert main(["advise", "lama", "--devices", "2"]) == 2
    assert "Use one of gpt2-124m" in capsys.readouterr().err
    assert main(["advise", "lama", "--devices", "2", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "ShardConfigValueError"
    assert main(["advise", f"{__name__}:Refuses", "--devices", "2", "--sequence", "4"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"test_advise.py:\d+: ValueError: no tokens\n$", said)
    assert said.count("\n") == 1


@pytest.mark.matrix
def test_the_command_also_draws_strategies_that_do_not_fit(tmp_path, capsys):
    picture = tmp_path / "advice.png"
    shape = "layers=3,width=64,heads=4,vocabulary=256,sequence=32"
    assert main(["advise", shape, "--devices", "2", "--memory", "1KiB", "--plot", str(picture)]) == 1
    assert "Nothing fits" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sizes_are_parsed_in_powers_of_ten_and_of_two():
    assert [size(given) for given in ("5GB", "40GiB", "1 KiB", "7", "1.5MB")] == [
        5 * 10**9,
        40 << 30,
        1024,
        7,
        1_500_000,
    ]
    for given in ("", "GB", "-1GB", "0", "three"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size; give one such as"):
            size(given)
