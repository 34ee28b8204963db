"""On an accelerator: the operators, events and waits that a group adds to a step, counted on simulated streams."""

from __future__ import annotations

import contextlib
import functools
import textwrap
from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from _blocks import Transformer, next_token_loss, token_batch
from _engines import ENGINES, forced
from composable_shard import testing
from composable_shard._comm import collectives
from composable_shard._comm.lanes import cpu_lanes
from composable_shard.testing._clocks import Event, Stream, StreamClock
from composable_shard.testing._lanes import StreamedLane
from composable_shard.testing._torch import cpu_streams

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PRECISIONS = {"float32": MixedPrecisionPolicy(param_dtype=torch.float32), "bfloat16": BF16}
NO_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "unsafe_split_with_sizes")


class Counts(TorchDispatchMode):
    """Counts the operators that a device would run: all except views and allocations."""

    def __init__(self):
        super().__init__()
        self.all = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if not (func.is_view or name in NO_WORK or func.namespace in ("c10d", "prim", "profiler")):
            self.all[name] += 1
        return func(*args, **(kwargs or {}))


class CountingClock(StreamClock):
    """Counts the calls to streams and events."""

    def __init__(self):
        super().__init__()
        self.all = Counter()
        self.default = CountedStream(self, 0.0)

    def stream(self, priority=-1):
        return CountedStream(self, 0.0)

    def event(self):
        return CountedEvent(self)


class CountedStream(Stream):
    def wait_event(self, event):
        self._clock.all["wait"] += 1
        super().wait_event(event)

    def wait_stream(self, stream):
        self._clock.all["wait"] += 1
        super().wait_stream(stream)


class CountedEvent(Event):
    def record(self, stream=None):
        self._clock.all["record"] += 1
        super().record(stream)

    def synchronize(self):
        self._clock.all["wait of the host"] += 1
        super().synchronize()


def counted(engine, layers, policy, microbatches):
    """Operators and event calls of one steady step; without an engine, those of the model alone."""
    torch.manual_seed(0)
    clock = CountingClock()
    with contextlib.ExitStack() as stack:
        stack.enter_context(testing.fake(8))
        stack.enter_context(cpu_streams(clock.stream, clock.event, clock.default))
        stack.enter_context(cpu_lanes(lambda: StreamedLane(clock)))
        model = Transformer(layers=layers)
        if engine is None:
            model.to(policy.param_dtype)
        else:
            for each in (*model.blocks, model):
                engine(each, mp_policy=policy)

        def step():
            for at in range(microbatches):
                if engine is not None:
                    model.set_requires_gradient_sync(at == microbatches - 1)
                next_token_loss(model, *token_batch(0, 0)).backward()
            model.zero_grad()

        for _ in range(4):
            step()
        clock.all.clear()
        with Counts() as counts:
            step()
    return counts.all, clock.all


def added(engine, policy, microbatches):
    """By group and step: operators beyond the model's, and event calls. Computed from two models of different depth."""
    (large, clock), (small, less) = (counted(engine, layers, policy, microbatches) for layers in (5, 3))
    (plain, _), (fewer, _) = (counted(None, layers, policy, microbatches) for layers in (5, 3))
    blocks = {name: (large[name] - small[name] - plain[name] + fewer[name]) / 2 for name in {*large, *plain}}
    return {name: n for name, n in blocks.items() if n}, {name: (clock[name] - less[name]) / 2 for name in clock}


def line(name, engine, policy, microbatches=1):
    operators, events = added(engine, policy, microbatches)
    of_group = {**dict(sorted(operators.items())), **dict(sorted(events.items()))}
    text = ", ".join(f"{each} {number:g}" for each, number in of_group.items())
    return textwrap.fill(f"{name}: {text}", 110, subsequent_indent="  ")


@pytest.fixture
def averaging(monkeypatch):
    """Make the collectives of the fake process group return means, as those of NCCL do."""
    made = collectives.Packed.__init__
    monkeypatch.setattr(collectives.Packed, "__init__", functools.partialmethod(made, averages=True))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with few cores, the threads of small operators would wait for each other
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("averaging")
def test_a_group_adds_few_operators_and_events_to_a_step():
    """With direct gathers, a group adds at most three operators, six records and nine waits.

    With bfloat16, two more operators cast the inputs of a block, in FSDP2 as well.
    """
    lines = []
    for precision, policy in PRECISIONS.items():
        for transport in ("direct", "packed"):
            with forced(transport):
                lines.append(line(f"ours {precision} {transport}", ENGINES["ours"], policy))
        operators, _ = added(ENGINES["fsdp2"], policy, 1)
        lines.append(f"fsdp2 {precision}: {sum(operators.values()):g} operators")
    if torch.__version__ >= "2.15":  # FSDP2 casts gradients when it packs them
        assert lines.pop() == "fsdp2 bfloat16: 7 operators"
        lines.append("fsdp2 bfloat16: 9 operators")
    assert_expected_inline(
        "\n".join(lines),
        """\
ours float32 direct: _chunk_cat 1, record 6, wait 7
ours float32 packed: _chunk_cat 1, _foreach_copy_ 2, split_with_sizes_copy 2, record 6, wait 9
fsdp2 float32: 5 operators
ours bfloat16 direct: _chunk_cat 1, _foreach_copy_ 2, _to_copy 2, record 6, wait 8
ours bfloat16 packed: _chunk_cat 1, _foreach_copy_ 2, _to_copy 2, split_with_sizes_copy 2, record 6, wait 15
fsdp2 bfloat16: 9 operators""",
    )


@pytest.mark.usefixtures("averaging")
def test_microbatches_without_sync_add_one_operator_per_group():
    """The model alone uses one for each of nine parameters, in the second and the third microbatch."""
    with forced("direct"):
        lines = [line(name, ENGINES["ours"], policy, 3) for name, policy in PRECISIONS.items()]
    assert_expected_inline(
        "\n".join(lines),
        """\
float32: _assert_async 1, _chunk_cat 1, _foreach_add_ 3, add_ -18, all 1, cat 1, full 1, record 14, wait 15
bfloat16: _assert_async 1, _chunk_cat 1, _foreach_add_ 3, _foreach_copy_ 7, _to_copy 6, add_ -18, all 1, cat
  1, full 1, record 14, wait 14""",
    )
