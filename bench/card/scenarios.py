"""Ways to shard and train a small model, each looked at by the race checker of `race.py`, and bugs that it has to find.

    python bench/card/scenarios.py                    # all scenarios; a race is an error
    python bench/card/scenarios.py default packed     # some of them
    python bench/card/scenarios.py --planted          # the library with a wait taken out; no race is an error
    python bench/card/scenarios.py --list

A quarter of a minute, on a CPU. A planted bug that is known to stay hidden says so: what it takes out is not covered by
the scenarios, so that they are no evidence for it. Where a scenario has races that are known, it says what is wrong.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _report
import composable_shard
from card import race
from composable_shard import MixedPrecisionPolicy, PoolPolicy, PrefetchPolicy
from composable_shard._comm.lanes import Job, Launched
from composable_shard._engine.actions import Actions
from composable_shard._group.bucket import GatherBucket
from composable_shard._group.reduction import ReduceBucket
from composable_shard.testing._lanes import StreamedLane

WORLD = 4
WIDTH = 64
BATCH = 8
STEPS = 6

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def block(width: int = WIDTH, hidden: int = 2 * WIDTH) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Either(nn.Module):
    """Uses one of its two layers, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers[self.calls % 2](x)


@dataclass
class Training:
    """A model in training. `number` is that of the step."""

    machine: race.Machine
    watch: race.Watch
    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    width: int
    number: int = 0

    def batch(self) -> Tensor:
        return torch.randn(BATCH, self.width)

    def backward(self) -> None:
        """Forward of a batch, and its backward."""
        self.model(self.batch()).float().square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain_step(training: Training) -> None:
    training.backward()
    training.update()


@dataclass(frozen=True)
class Scenario:
    """How a model is sharded and trained.

    Attributes:
        options: of `fully_shard`.
        transport: by which parameters are gathered and gradients reduced.
        mesh: its shape.
        make_block: makes one of `blocks` blocks, which takes `width` numbers.
        prepare: is given the sharded model.
        step: one step of training.
        end: after the last step.
        known: what is wrong in the library, if races are known.
    """

    options: dict[str, Any] = field(default_factory=dict)
    transport: str = "direct"
    mesh: tuple[int, ...] = (WORLD,)
    make_block: Callable[[], nn.Module] = block
    width: int = WIDTH
    blocks: int = 4
    prepare: Callable[[nn.Sequential], object] | None = None
    step: Callable[[Training], None] = plain_step
    end: Callable[[Training], None] | None = None
    known: str = ""


def build(scenario: Scenario) -> nn.Sequential:
    torch.manual_seed(0)
    names = ("replicate", "shard")[-len(scenario.mesh) :]
    mesh = init_device_mesh("cpu", scenario.mesh, mesh_dim_names=names)
    model = nn.Sequential(*(scenario.make_block() for _ in range(scenario.blocks)))
    for module in (*model, model):
        composable_shard.fully_shard(module, mesh=mesh, **scenario.options)
    if scenario.prepare is not None:
        scenario.prepare(model)
    return model


def perform(scenario: Scenario) -> race.Watch:
    """Trains the model for some steps; returns what the checker saw."""
    watch = race.Watch()
    with race.simulated(WORLD) as machine, race.transport(scenario.transport), watch:
        model = build(scenario)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        training = Training(machine, watch, model, optimizer, scenario.width)
        del model, optimizer  # a step may drop them
        for training.number in range(STEPS):
            scenario.step(training)
        if scenario.end is not None:
            scenario.end(training)
    return watch


def accumulate(training: Training) -> None:
    for micro_batch in range(3):
        training.model.set_requires_gradient_sync(micro_batch == 2)
        training.backward()
    training.update()


def two_backwards(training: Training) -> None:
    training.model.set_is_last_backward(False)
    training.backward()
    training.model.set_is_last_backward(True)
    plain_step(training)


def evaluate_too(training: Training) -> None:
    plain_step(training)
    with torch.no_grad():
        training.model(training.batch())


def checkpointed_step(training: Training) -> None:
    def forward(x: Tensor) -> Tensor:
        for module in blocks:
            x = checkpoint(module, x, use_reentrant=False)
        return x

    blocks = list(training.model)
    training.model.forward = forward
    training.model(training.batch().requires_grad_()).square().mean().backward()
    training.update()


def touch_gradients(training: Training) -> None:
    training.backward()
    for parameter in training.model.parameters():
        parameter.grad._local_tensor.mul_(0.5)
    training.update()


def halve_gradients(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))


def fail(training: Training, in_backward: bool) -> None:
    """A step that ends with an error in forward or in backward."""
    failing = training.model[2][1] if in_backward else training.model[1]
    handle = (failing.register_full_backward_hook if in_backward else failing.register_forward_hook)(_raise)
    try:
        training.backward()
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("the step did not fail")
    finally:
        handle.remove()


def _raise(*_of_the_hook: object) -> None:
    raise ZeroDivisionError


def fail_first(training: Training) -> None:
    fail(training, in_backward=training.number % 2 == 0)
    plain_step(training)


def fail_and_drop(training: Training, in_backward: bool) -> None:
    """The model is deleted after an error, and its memory may be used by compute, whatever was in flight."""
    fail(training, in_backward)
    model = weakref.ref(training.model)
    del training.model, training.optimizer
    gc.collect()
    assert model() is None
    training.watch.give_back()


@contextmanager
def on_side_stream(training: Training) -> Iterator[None]:
    """A stream of the user's own, well fenced."""
    side, compute = training.machine.stream("side"), training.machine.compute
    side.wait_stream(compute)
    with torch.cpu.stream(side):  # type: ignore[arg-type]
        yield
    compute.wait_stream(side)


def side_in_turns(training: Training) -> None:
    with on_side_stream(training) if training.number % 2 else nullcontext():
        plain_step(training)


def side_backward(training: Training) -> None:
    with on_side_stream(training):
        training.backward()
    training.update()


def three_quarters(model: nn.Sequential) -> None:
    model.set_pool_policy(PoolPolicy(budget=composable_shard.make_plan(model).peak_bytes * 3 // 4))


UNEVEN = Scenario(make_block=functools.partial(block, 66, 65), width=66)

SCENARIOS = {
    "default": Scenario(),
    "packed": Scenario(transport="packed"),
    "half": Scenario({"mp_policy": HALF}),
    "mixed": Scenario({"mp_policy": MIXED}),
    "mixed-packed": Scenario({"mp_policy": MIXED}, transport="packed"),
    "keep-weights": Scenario({"reshard_after_forward": False}),
    "three-ahead": Scenario(blocks=6, prepare=lambda model: model.set_prefetch_policy(PrefetchPolicy.depth(3))),
    "accumulate": Scenario(step=accumulate),
    "evaluate": Scenario(step=evaluate_too),
    "gradient-hooks": Scenario(prepare=halve_gradients),
    "checkpoint": Scenario(step=checkpointed_step),
    "gradients-touched": Scenario(step=touch_gradients),
    "two-backwards": Scenario(step=two_backwards),
    "budget": Scenario(blocks=6, prepare=three_quarters),
    "few-ranks": Scenario({"reshard_after_forward": 2}),
    "failing": Scenario(step=fail_first),
    "dropped-in-forward": Scenario(end=functools.partial(fail_and_drop, in_backward=False)),
    "dropped-in-backward": Scenario(
        end=functools.partial(fail_and_drop, in_backward=True),
    ),
    "side-in-turns": Scenario(step=side_in_turns),
    "side-backward": Scenario(step=side_backward),
    "replicas": Scenario(mesh=(2, 2)),
    "replicas-mixed": Scenario({"mp_policy": MIXED}, mesh=(2, 2)),
    "uneven": UNEVEN,
    "uneven-packed": Scenario(transport="packed", make_block=UNEVEN.make_block, width=UNEVEN.width),
    "unused": Scenario(make_block=Either),
}


@dataclass(frozen=True)
class Bug:
    """A wait that is taken out of the library, in words and as a context.

    Attributes:
        found: whether the checker finds it in the scenario.
    """

    label: str
    plant: Callable[[], AbstractContextManager[object]]
    scenario: str = "default"
    found: bool = True


@contextmanager
def gathers_ignore_slots() -> Iterator[None]:
    real = StreamedLane._queued

    def queued(lane: StreamedLane, after: Any, begin: Callable[[], Job[Any]]) -> Job[Any]:
        return real(lane, tuple(after)[:1], begin)

    with mock.patch.object(StreamedLane, "_queued", queued):
        yield


@contextmanager
def gathers_ignore_optimizer() -> Iterator[None]:
    def forget(actions: Actions, at: object = None) -> None:
        actions.changed = None

    with mock.patch.object(Actions, "parameters_changed", forget):
        yield


@contextmanager
def compute_ignores_jobs() -> Iterator[None]:
    real = Launched.finish

    def finish(job: Launched[Any], on_host: bool = False) -> Any:
        with mock.patch.object(race.Event, "wait"):
            return real(job, on_host)

    with mock.patch.object(Launched, "finish", finish):
        yield


@contextmanager
def packing_ignores_slots() -> Iterator[None]:
    real = ReduceBucket._pack

    def pack(bucket: ReduceBucket, gradients: Any, out: Tensor, slots: Any) -> None:
        after, slots[0].free_after = slots[0].free_after, ()
        real(bucket, gradients, out, slots)
        slots[0].free_after = after

    with mock.patch.object(ReduceBucket, "_pack", pack):
        yield


@contextmanager
def slots_carry_no_event() -> Iterator[None]:
    real = GatherBucket.release

    def release(bucket: GatherBucket, after: object, reserve: bool = False) -> Any:
        return real(bucket, None, reserve)

    with mock.patch.object(GatherBucket, "release", release):
        yield


BUGS = {
    "gathers-ignore-slots": Bug("gathers do not wait for what their slot was used for before", gathers_ignore_slots),
    "gathers-ignore-optimizer": Bug("gathers do not wait for the optimizer", gathers_ignore_optimizer),
    "compute-ignores-jobs": Bug("compute does not wait for gathers and reductions", compute_ignores_jobs),
    "packing-ignores-slots": Bug(
        "gradients are packed without a wait for what the bucket's slot was used for before",
        packing_ignores_slots,
        found=False,  # compute waits for the same by other events
    ),
    "slots-carry-no-event": Bug("slots of weights are given back without an event", slots_carry_no_event),
}


@dataclass(frozen=True)
class Outcome:
    """What came out of a scenario, and whether that was expected."""

    name: str
    planted: bool
    operators: int
    races: list[str]
    expected: bool
    seconds: float


def run(name: str, planted: bool) -> Outcome:
    """Performs a scenario, or the one of a planted bug, and prints what was found."""
    begin = time.perf_counter()
    if planted:
        bug = BUGS[name]
        with bug.plant():
            watch = perform(SCENARIOS[bug.scenario])
        expected = bool(watch.races) == bug.found
    else:
        watch = perform(SCENARIOS[name])
        expected = bool(watch.races) == bool(SCENARIOS[name].known)
    race.show(name, watch)
    if not expected:
        print("    NOT EXPECTED", flush=True)
    elif planted and not watch.races:
        print("    stays hidden, as is known")
    elif not planted and watch.races:
        print(f"    known: {SCENARIOS[name].known}")
    for skipped, count in watch.skipped.items():
        print(f"    not looked at, {count} times: {skipped}")
    seconds = round(time.perf_counter() - begin, 2)
    return Outcome(name, planted, watch.operators, [*race.lines(watch.races)], expected, seconds)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scenarios, or bugs with --planted (default: all)")
    parser.add_argument("--planted", action="store_true", help="plant bugs, which the checker has to find")
    parser.add_argument("--list", action="store_true", help="the names that are known, and nothing else")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    options = parser.parse_args(argv)
    known = BUGS if options.planted else SCENARIOS
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    options.names = options.names or [*known]
    return options


def main() -> int:
    options = parse()
    if options.list:
        print("\n".join(["scenarios:", *(f"    {name}" for name in SCENARIOS), "planted bugs:"]))
        print("\n".join(f"    {name}: {bug.label}" for name, bug in BUGS.items()))
        return 0
    torch.set_num_threads(1)
    outcomes = [run(name, options.planted) for name in options.names]
    wrong = [outcome.name for outcome in outcomes if not outcome.expected]
    print(f"{len(outcomes)} {'planted bugs' if options.planted else 'scenarios'}, {len(wrong)} not as expected", *wrong)
    if options.json:
        _report.write_json(options.json, "race", {"names": options.names, "planted": options.planted}, outcomes)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
