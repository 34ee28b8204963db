"""A step as a trace: the predicted and the measured step, on a network on which both are exact."""

from __future__ import annotations

import json

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _plans import block_plan, costs_of
from composable_shard._plan.record import Span
from composable_shard._plan.schedule import Action, Kind
from composable_shard.report import timeline
from composable_shard.testing import Busy, fabric


def network(**options):
    """A network in which a gather or a reduction of the blocks below takes 36 us."""
    return fabric(4, latency_s=12e-6, bandwidth_Bps=64e6, clock="virtual", **options)


def block():
    """Two matrices, each with 10 us of compute in forward and 20 us in backward."""
    return nn.Sequential(*(each for _ in range(2) for each in (nn.Linear(16, 16, bias=False), Busy(10e-6))))


def watched_step(steps=3):
    """Run a model of three blocks; return its plan with costs, the record of a step, and the exposed time."""
    with network() as net:
        model = nn.Sequential(*(block() for _ in range(3)))
        for each in model:
            cs.fully_shard(each, mesh=init_device_mesh("cpu", (4,)))
        cs.fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        cs.watch(model)
        for _ in range(steps):
            net.reset()
            model(torch.ones(2, 16, requires_grad=True)).sum().backward()
        plan = cs.make_plan(model)
        forward, backward, gather = (dict.fromkeys(plan.order, seconds) for seconds in (20e-6, 40e-6, 36e-6))
        reduce = dict.fromkeys(plan.order, 12e-6 + 3 / 4 * (2048 + 64) / 64e6)  # including marks, 16 bytes per rank
        costs = cs.Costs.of(
            latency=0.0, bandwidth=1.0, forward=forward, backward=backward, gather=gather, reduce=reduce
        )
        return plan.with_policies(costs=costs), cs.last_record(model), net.exposed_s


def sides(path):
    """The trace by process: its tracks by name, each a list of slices, and its live bytes."""
    found = {}
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for pid, name in names.items():
        own = [event for event in events if event["pid"] == pid]
        tracks = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
        slices = {
            track: [
                (e["cat"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in own if e["ph"] == "X" and e["tid"] == tid
            ]
            for tid, track in tracks.items()
        }
        found[name] = slices, [(e["ts"], e["args"]["bytes"]) for e in own if e["ph"] == "C"]
    return found


def text(path):
    lines = []
    for side, (tracks, memory) in sides(path).items():
        for track, slices in tracks.items():
            shown = [f"{kind} {fqn} {begin:g}-{end:g}" for kind, fqn, begin, end in slices]
            lines += [f"{side} {track}", *(f"  {', '.join(shown[at : at + 3])}" for at in range(0, len(shown), 3))]
        lines.append(f"{side} memory: at most {max(live for _, live in memory)}, {len(memory)} times")
    return "\n".join(lines)


def test_a_trace_contains_the_predicted_and_the_measured_step(tmp_path):
    plan, record, _ = watched_step()
    timeline(plan, record, tmp_path / "trace.json")
    assert_expected_inline(
        text(tmp_path / "trace.json"),
        """\
predicted compute
  forward 0 36-56, forward 1 72-92, forward 2 108-128
  backward 2 164-204, backward 1 204-224, backward 1 240.75-260.75
  backward 0 276.75-316.75
predicted gathers
  gathers 0 0-36, gathers 1 36-72, gathers 2 72-108
  gathers 2 128-164, gathers 1 164-200, gathers 0 240.75-276.75
predicted reductions
  reductions 2 204-240.75, reductions 1 276.75-313.5, reductions 0 316.75-353.5
predicted waits
  wait for a gather 0 0-36, wait for a gather 1 56-72, wait for a gather 2 92-108
  wait for a gather 2 128-164, wait for a reduction 2 224-240.75, wait for a gather 0 260.75-276.75
  wait for a reduction 0 316.75-353.5
predicted memory: at most 5120, 24 times
measured compute
  forward 0 36-56, forward 1 72-92, forward 2 108-128
  backward 2 164-204, backward 1 204-276.75, backward 0 276.75-316.75
measured gathers
  gathers 0 0-36, gathers 1 36-72, gathers 2 72-108
  gathers 2 128-164, gathers 1 164-204, gathers 0 240.75-276.75
measured reductions
  reductions 2 204-240.75, reductions 1 260.75-316.75, reductions 0 316.75-353.5
measured waits
  wait for a gather 0 0-36, wait for a gather 1 56-72, wait for a gather 2 92-108
  wait for a gather 2 128-164, wait for a reduction 2 224-240.75, wait for a gather 0 260.75-276.75
  wait for a reduction 0 316.75-353.5
measured memory: at most 5120, 24 times""",
    )


def test_on_an_exact_clock_the_prediction_equals_the_measurement(tmp_path):
    plan, record, exposed_s = watched_step()
    timeline(plan, record, tmp_path / "trace.json")
    (predicted, foreseen), (measured, seen) = sides(tmp_path / "trace.json").values()
    assert predicted["waits"] == measured["waits"]
    assert foreseen == seen
    waited = sum(end - begin for *_, begin, end in measured["waits"])
    assert waited == pytest.approx(1e6 * exposed_s)
    assert waited == pytest.approx(1e6 * plan.predicted().exposed)
    computed = sum(end - begin for *_, begin, end in predicted["compute"])
    assert computed == pytest.approx(3 * 60)


def test_the_same_step_gives_the_same_text(tmp_path):
    for name in ("one", "two"):
        plan, record, _ = watched_step()
        timeline(plan, record, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_plan_without_costs_has_no_prediction(tmp_path):
    plan, record, _ = watched_step()
    for costless in (block_plan(), cs.ShardPlan(plan.groups, plan.order)):
        timeline(costless, record, tmp_path / "trace.json")
        assert list(sides(tmp_path / "trace.json")) == ["measured"]


def record_of(*spans, actions=None):
    """A record of spans in seconds."""
    spans = tuple(Span(Kind[kind], fqn, begin, end) for kind, fqn, begin, end in spans)
    acts = [Action(span.kind, span.fqn) for span in spans if span.kind not in (Kind.FORWARD, Kind.BACKWARD)]
    acts = acts if actions is None else actions
    return cs.Record(tuple(acts), (0,) * len(acts), (), spans=spans)


def test_overlapping_gathers_have_separate_tracks(tmp_path):
    record = record_of(
        ("UNSHARD", "a", 1.0, 1.0), ("UNSHARD", "b", 1.5, 1.5), ("WAIT", "a", 2.0, 3.0), ("UNSHARD", "c", 3.0, 3.0),
        ("WAIT", "b", 3.5, 4.0), ("WAIT", "c", 4.0, 4.0),
    )  # fmt: skip
    timeline(block_plan(), record, tmp_path / "trace.json")
    tracks, _ = sides(tmp_path / "trace.json")["measured"]
    seconds = {
        track: [(fqn, begin / 1e6, end / 1e6) for _, fqn, begin, end in slices] for track, slices in tracks.items()
    }
    assert seconds["gathers"] == [("a", 0.0, 2.0), ("c", 2.0, 3.0)], "times count from the beginning of the first span"
    assert seconds["gathers 2"] == [("b", 0.5, 3.0)]
    assert [fqn for fqn, *_ in seconds["waits"]] == ["a", "b"], "a wait of zero length is left out"


def test_a_record_without_times_is_an_error_that_explains_how_to_watch(tmp_path):
    plan = block_plan()
    plan = plan.with_policies(costs=costs_of(plan))
    for record in (None, cs.Record((), (), ())):
        with pytest.raises(cs.errors.ShardConfigValueError, match=r"no times; call cs\.watch\(model\)"):
            timeline(plan, record, tmp_path / "trace.json")
    half = record_of(("WAIT", "a", 0.0, 1.0), actions=[Action(Kind.UNSHARD, "a"), Action(Kind.WAIT, "a")])
    with pytest.raises(
        cs.errors.ShardConfigValueError, match="UNSHARD a has no times: the model was watched for a part"
    ):
        timeline(plan, half, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
