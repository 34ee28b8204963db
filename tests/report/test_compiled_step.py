"""A compiled step and its plan: what the graphs hide, what is exposed that the plan hides, which graphs ran last."""

from __future__ import annotations

import contextlib
import textwrap
import warnings
from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from composable_shard._graph import guard
from composable_shard._graph.guard import graphs_compiled, read
from composable_shard._plan.course import flights_of
from composable_shard._torch.compiler import aot_backend, as_it_is
from composable_shard.report import CompiledStep, compiled_step
from composable_shard.report._compiled_step import step_of
from composable_shard.testing import Busy, Fabric, fabric

with warnings.catch_warnings():  # this import warns
    warnings.simplefilter("ignore")
    import torch._dynamo


@contextlib.contextmanager
def network() -> Iterator[Fabric]:
    """A network in which a gather or a reduction of the blocks below takes 36 us."""
    torch._dynamo.reset()
    with fabric(4, latency_s=12e-6, bandwidth_Bps=64e6, clock="virtual") as net:
        yield net
    torch._dynamo.reset()


class Block(nn.Module):
    """Two matrices, each with 10 us of compute in forward and 20 us in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(each for _ in range(2) for each in (nn.Linear(16, 16, bias=False), nn.Tanh(), Busy(10e-6)))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Chain(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def sharded(model: nn.Module, *parts: nn.Module) -> nn.Module:
    for each in (*parts, model):
        cs.fully_shard(each, mesh=init_device_mesh("cpu", (4,)))
    return model


def chain() -> nn.Module:
    """Three blocks, each a group; the root has no parameters."""
    model = Chain(*(Block() for _ in range(3)))
    return sharded(model, *model)


def timed_plan(model: nn.Module) -> cs.ShardPlan:
    """The plan of the model, with the times of `network`."""
    order = cs.make_plan(model).order
    forward, backward, gather = (dict.fromkeys(order, seconds) for seconds in (20e-6, 40e-6, 36e-6))
    reduce = dict.fromkeys(order, 12e-6 + 3 / 4 * (2048 + 64) / 64e6)  # including marks, 16 bytes per rank
    costs = cs.Costs.of(latency=0.0, bandwidth=1.0, forward=forward, backward=backward, gather=gather, reduce=reduce)
    return cs.make_plan(model).with_policies(costs=costs)


def timed(model: nn.Module) -> CompiledStep:
    """The step that ran last, compared with that plan."""
    return step_of(graphs_compiled(model._shard_state.compiled_as), timed_plan(model))


def as_inductor_without_overlap(module, inputs):
    """Like plain `torch.compile`: the guard reads the graph and moves nothing."""
    read(module.graph)
    return as_it_is(module, inputs)


def train(run: nn.Module) -> None:
    run(torch.ones(2, 16, requires_grad=True)).sum().backward()


def waited(step: CompiledStep, planned: bool = False) -> float:
    """Seconds that compute waits in the compiled step, or in its plan."""
    courses = step.planned if planned else step.compiled
    return sum(flight.waited for course in courses for flight in flights_of(course, step.times))


def test_a_compiled_step_is_compared_with_its_plan(tmp_path, texts):
    with network() as net:
        model = chain()
        with pytest.raises(
            cs.errors.ShardConfigStateError, match=r"has run no compiled graph .* step of cs\.compile\(model\)"
        ):
            compiled_step(model)
        run = cs.compile(model, backend="aot_eager")
        train(run)
        exposed_s, step, with_times = net.exposed_s, compiled_step(model), timed(model)  # without a warning
        assert step.exposed == with_times.exposed == ()
        assert waited(with_times) == pytest.approx(exposed_s)
        assert waited(with_times, planned=True) == pytest.approx(timed_plan(model).predicted().exposed)
        step.draw(tmp_path / "step.png")
        with_times.draw(tmp_path / "times.png")
        with torch.no_grad():
            run(torch.ones(2, 16))
        without_backward = str(compiled_step(model))
        with torch._dynamo.config.patch(error_on_recompile=True):
            train(run)
        assert str(compiled_step(model)) == str(step), "the graphs that ran last, not the graphs compiled last"
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    shown = {
        "compiled: compute",
        "compiled: gathers",
        "planned: reductions",
        "planned: waits",
        "steps of the course",
        "ms",
    }
    assert shown <= set(texts)
    assert_expected_inline(
        str(step),
        """\
peak bytes of weights and of gradients in flight: 4,096; planned 5,120
forward: GwGccwGccwcc; planned GwGcwGcwc
               bytes  dtype    behind   planned behind
  gather of 0  2,048  float32  nothing  nothing
  gather of 1  2,048  float32  0        0
  gather of 2  2,048  float32  1        1
backward: GcwGcRcwcwGcRcwcwRw; planned GwGcRwcwGcRwcRww
                  bytes  dtype    behind   planned behind
  gather of 2     2,048  float32  2        nothing
  gather of 1     2,048  float32  2, 1     2
  reduction of 2  2,048  float32  1        1
  gather of 0     2,048  float32  1, 0     1
  reduction of 1  2,048  float32  0        0
  reduction of 0  2,048  float32  nothing  nothing""",
    )
    assert_expected_inline(
        without_backward,
        """\
peak bytes of weights and of gradients in flight: 4,096; planned 5,120
forward: GwGccwGccwcc; planned GwGcwGcwc
               bytes  dtype    behind   planned behind
  gather of 0  2,048  float32  nothing  nothing
  gather of 1  2,048  float32  0        0
  gather of 2  2,048  float32  1        1""",
    )


def test_an_exposed_collective_that_the_plan_hides_is_named():
    with network() as net:
        model = chain()
        train(torch.compile(model, backend=aot_backend(as_inductor_without_overlap), fullgraph=True))
        with pytest.warns(cs.errors.CompiledGraphWarning) as warned:
            step = compiled_step(model)
        with_times = timed(model)
        assert waited(with_times) == pytest.approx(net.exposed_s)
    (warning,) = warned
    assert_expected_inline(
        "\n".join(textwrap.wrap(str(warning.message), 100)),
        """\
gather of 1: no compute overlaps with it in the compiled forward; the plan hides it behind 0 (and 5
more; print the compiled step to list them). Results are correct, but the step takes longer. Compile
with cs.compile, which places communication as planned""",
    )
    assert_expected_inline(
        "\n".join(step.exposed),
        """\
gather of 1: no compute overlaps with it in the compiled forward; the plan hides it behind 0
gather of 2: no compute overlaps with it in the compiled forward; the plan hides it behind 1
reduction of 2: no compute overlaps with it in the compiled backward; the plan hides it behind 1
gather of 1: no compute overlaps with it in the compiled backward; the plan hides it behind 2
reduction of 1: no compute overlaps with it in the compiled backward; the plan hides it behind 0
gather of 0: no compute overlaps with it in the compiled backward; the plan hides it behind 1""",
    )
    assert_expected_inline(
        "\n".join(with_times.exposed),
        """\
gather of 1: exposed for 0.036 ms in the compiled forward, 0.016 ms planned; the plan hides it behind 0
gather of 2: exposed for 0.036 ms in the compiled forward, 0.016 ms planned; the plan hides it behind 1
reduction of 2: exposed for 0.037 ms in the compiled backward, 0.017 ms planned; the plan hides it behind 1
gather of 1: exposed for 0.036 ms in the compiled backward, 0.000 ms planned; the plan hides it behind 2
reduction of 1: exposed for 0.037 ms in the compiled backward, 0.000 ms planned; the plan hides it behind 0
gather of 0: exposed for 0.036 ms in the compiled backward, 0.016 ms planned; the plan hides it behind 1""",
    )


UNKNOWN = r"the graphs of this model are not known.*watch_graphs\(\) around the first"


def test_missing_graphs_are_errors_that_explain_what_to_do(monkeypatch):
    with pytest.raises(cs.errors.ShardConfigValueError, match="Linear contains no sharded module"):
        compiled_step(nn.Linear(2, 2))
    monkeypatch.setattr(guard, "_MOST_COMPILATIONS", 1)
    with network():
        model, *others = (sharded(nn.Linear(4, width)) for width in (4, 5, 6))
        torch.compile(model, backend="aot_eager")(torch.ones(2, 4))
        with pytest.raises(cs.errors.ShardConfigStateError, match=UNKNOWN):
            compiled_step(model)
        for each in others:
            cs.compile(each, backend="aot_eager")(torch.ones(2, 4))
        assert compiled_step(others[1]).compiled[0]
        with pytest.raises(cs.errors.ShardConfigStateError, match=UNKNOWN):
            compiled_step(others[0])
