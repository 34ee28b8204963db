"""Measure float8 training of a Llama 3 decoder: compiled blocks with FSDP2 and ours, and one graph with ours.

    python bench/card/float8.py                        # 4,096 and 8,192 tokens; needs torchao and float8 on the GPU
    python bench/card/float8.py --tokens 4096 --engines fsdp2-blocks-float8,ours-blocks-float8
    python bench/card/float8.py --device cpu --size tiny --tokens 32 --world 2 --rounds 1 --steps 1 --backend aot_eager

Model, ranks, engines and turns are those of `llama_steps.py`. All engines run in the same rounds. `-float8` is
torchao's tensorwise recipe with float8 all-gather. The scales of all weights are computed after the optimizer step, and
are part of the step. On a CPU, products of float8 are emulated.

All-gathered bytes are counted in the process group, below both libraries. They are the bytes of all outputs in a step.

If an engine fails, its error is its result, and the other engines continue. The exit status is 1 if one of ours fails,
or if a loss differs from that of FSDP2 in the same format by more than `--tolerance`. Two batches alternate, so that
losses fall and depend on all gradients. With new batches, useless weights would have the same losses as trained ones.
To judge the tolerance, compare the difference with that of float8 and bfloat16, which is shown too.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _report
import llama_steps
from _echo import EchoGroup
from _llama_model import TORCHAO, find_float8_obstacle
from _players import Player
from llama_steps import FLOAT8, FSDP2, MIB, Memory, Turn, name_reference, split_name

SUFFIX = f"-{FLOAT8}"
ENGINES = (
    "fsdp2-blocks,ours-blocks,ours-whole,fsdp2-blocks-float8,fsdp2-again-blocks-float8,ours-blocks-float8,"
    "ours-whole-float8"
)
BATCHES = 2


@dataclass(frozen=True)
class Float8Result:
    """One engine with one sequence length. Figures are None if the engine failed before they were measured.

    Attributes:
        step_ms: time of forward, loss, backward and `optimizer_ms`.
        optimizer_ms: time of AdamW's step, and of the scales in float8.
        tokens_per_s: tokens over `step_ms`.
        over_fsdp2: ratio of `step_ms` to FSDP2 with compiled blocks in the same format, formed within each round.
        over_bf16: ratio of `step_ms` to the same engine in bfloat16, formed within each round.
        gathered_bytes: bytes of the outputs of all all-gathers in a step.
        memory: None on the CPU.
        loss_difference: the largest relative difference to the losses of FSDP2 with compiled blocks in the same format;
            None if a loss is not finite, or if there is no such engine.
        bf16_loss_difference: the largest relative difference to the losses of the same engine in bfloat16.
        losses: the losses of the timed steps.
        error: the error of an engine that failed.
    """

    tokens: int
    engine: str
    step_ms: _report.Spread | None = None
    optimizer_ms: _report.Spread | None = None
    tokens_per_s: _report.Spread | None = None
    over_fsdp2: _report.Spread | None = None
    over_bf16: _report.Spread | None = None
    gathered_bytes: int | None = None
    memory: Memory | None = None
    loss_difference: float | None = None
    bf16_loss_difference: float | None = None
    losses: Sequence[float] = ()
    error: str | None = None


class Trainer(llama_steps.Trainer):
    """One engine's model and optimizer. A `Player` runs it in its own process."""

    def count_gathered(self, tokens: int) -> int:
        """Return the bytes of the outputs of all all-gathers in a step."""
        before = EchoGroup.gathered_bytes
        self._run(tokens, 1)
        return EchoGroup.gathered_bytes - before

    def _batch(self, tokens: int) -> Tensor:
        self._steps %= BATCHES
        return super()._batch(tokens)


class Engines:
    """The processes of all engines. An engine that fails takes part no longer.

    Attributes:
        errors: the errors of the engines that failed.
    """

    def __init__(self, players: Mapping[str, Player]) -> None:
        self._players = dict(players)
        self._shuffle = random.Random(0)
        self.errors: dict[str, str] = {}

    def start(self) -> None:
        """Wait until all models are built."""
        self._each(Player.ready)

    def call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of each engine in turn, in random order, and return the results."""
        return self._each(lambda player: player.call(method, *arguments))

    def _each(self, act: Callable[[Player], Any]) -> dict[str, Any]:
        results = {}
        for engine in self._shuffle.sample(list(self._players), len(self._players)):
            try:
                results[engine] = act(self._players[engine])
            except SystemExit as error:
                # What follows is the user's stack, with paths of this machine.
                self.errors[engine] = str(error).partition("\n\nfrom user code")[0]
                del self._players[engine]
        return results


def run(options: argparse.Namespace) -> list[Float8Result]:
    """Measure all engines with every sequence length. Figures are written after each round."""
    settings = {name: getattr(options, name) for name in ("device", "size", "world", "tokens", "backend")}
    results: list[Float8Result] = []
    with ExitStack() as stack:
        engines = Engines(
            {name: stack.enter_context(Player(name, Trainer, name, settings)) for name in options.engines}
        )
        engines.start()
        for tokens in options.tokens:
            finished = list(results)
            engines.call("warm_up", tokens)
            gathered, memory = engines.call("count_gathered", tokens), engines.call("memory", tokens)
            rounds: list[dict[str, Turn]] = []
            for _ in range(options.rounds):
                rounds.append(engines.call("measure", tokens, options.steps))
                results = finished + [
                    replace(each, gathered_bytes=gathered.get(each.engine), memory=memory.get(each.engine))
                    for each in evaluate(tokens, options.engines, rounds, engines.errors)
                ]
                save(results, options)
    return results


def save(results: list[Float8Result], options: argparse.Namespace) -> None:
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        settings[TORCHAO] = version(TORCHAO) if find_spec(TORCHAO) else None
        _report.write_json(options.json, "float8", settings, results, options.device)


def evaluate(
    tokens: int, engines: Sequence[str], rounds: Sequence[Mapping[str, Turn]], errors: Mapping[str, str]
) -> list[Float8Result]:
    """Compare the engines that took part in all rounds."""
    turns = {engine: [each[engine] for each in rounds] for engine in engines if all(engine in each for each in rounds)}
    optimizers = {engine: [s for turn in turns[engine] for s in turn.optimizers] for engine in turns}
    steps = {
        engine: [a + b for turn in turns[engine] for a, b in zip(turn.steps, turn.optimizers, strict=True)]
        for engine in turns
    }
    losses = {engine: [loss for turn in turns[engine] for loss in turn.losses] for engine in turns}

    def compare(engine: str, other: str) -> _report.Spread | None:
        if other not in steps:
            return None
        return _report.Spread.of([a / b for a, b in zip(steps[engine], steps[other], strict=True)])

    results = []
    for engine in engines:
        result = Float8Result(tokens, engine, error=errors.get(engine))
        if engine in turns:
            reference, half = name_reference(engine, FSDP2), engine.removesuffix(SUFFIX)
            result = replace(
                result,
                step_ms=_report.Spread.of([1e3 * seconds for seconds in steps[engine]]),
                optimizer_ms=_report.Spread.of([1e3 * seconds for seconds in optimizers[engine]]),
                tokens_per_s=_report.Spread.of([tokens / seconds for seconds in steps[engine]]),
                over_fsdp2=compare(engine, reference),
                over_bf16=compare(engine, half) if engine != half else None,
                losses=losses[engine],
                loss_difference=find_difference(losses[engine], losses.get(reference)),
                bf16_loss_difference=find_difference(losses[engine], losses.get(half)) if engine != half else None,
            )
        results.append(result)
    return results


def find_difference(losses: Sequence[float], others: Sequence[float] | None) -> float | None:
    """Return the largest relative difference; None if a loss is not finite, or if there is nothing to compare."""
    if others is None or not all(map(math.isfinite, [*losses, *others])):
        return None
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def find_problems(results: Sequence[Float8Result], tolerance: float) -> list[str]:
    """Describe which of our engines failed, and which losses differ from those of FSDP2."""
    problems = []
    for each in results:
        name = f"{each.tokens:,} tokens, {each.engine}"
        if each.error and not each.engine.startswith(FSDP2):
            problems.append(f"{name} failed")
        elif each.step_ms and each.loss_difference is None:
            problems.append(f"{name}: a loss is not finite, or FSDP2 has none")
        elif each.step_ms and each.loss_difference > tolerance:
            problems.append(
                f"{name}: losses differ from FSDP2 by {each.loss_difference:.1e}; --tolerance {tolerance:g}"
            )
    return problems


def show(results: Sequence[Float8Result], options: argparse.Namespace) -> None:
    for tokens in options.tokens:
        of_tokens = [each for each in results if each.tokens == tokens]
        _report.table(
            f"{options.size}, {tokens:,} tokens, world {options.world}, {options.device}",
            ("engine", "tokens/s", "step, ms", "optimizer", "/ FSDP2", "/ bf16", "gathered, MiB", "allocated")
            + ("reserved", "loss, FSDP2", "loss, bf16"),
            [describe(each) for each in of_tokens],
            f"median [quartiles] of {options.rounds} interleaved rounds of {options.steps} steps; losses: largest "
            "relative differences to FSDP2 in the same format, and to the same engine in bfloat16",
        )
        for each in of_tokens:
            if each.error:
                print(f"{each.engine}: {each.error}")


def describe(result: Float8Result) -> tuple[str, ...]:
    """Return the row of an engine."""

    def show_spread(spread: _report.Spread | None, digits: int) -> str:
        return spread.shown(digits) if spread else "-"

    def show_mib(count: int | None) -> str:
        return "-" if count is None else f"{count / MIB:,.1f}"

    def show_difference(difference: float | None) -> str:
        return "-" if difference is None else f"{difference:.1e}"

    memory = result.memory
    return (
        result.engine,
        show_spread(result.tokens_per_s, 0),
        *(f"{spread.median:.1f}" if spread else "-" for spread in (result.step_ms, result.optimizer_ms)),
        show_spread(result.over_fsdp2, 3),
        show_spread(result.over_bf16, 3),
        show_mib(result.gathered_bytes),
        show_mib(memory and memory.allocated),
        show_mib(memory and memory.reserved),
        show_difference(result.loss_difference),
        show_difference(result.bf16_loss_difference),
    )


def check_machine(options: argparse.Namespace) -> str | None:
    """Return why the float8 engines cannot run on this machine; None if they can."""
    if find_spec(TORCHAO) is None:
        return (
            f"engines with {SUFFIX} need {TORCHAO}, which is not installed. Without network, unpack its wheel into a "
            "folder of PYTHONPATH, as the GPU queue does with the folder .wheels"
        )
    return find_float8_obstacle(options.device)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llama_steps.add_options(parser, ENGINES)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=2e-3,
        help="largest relative difference of losses to FSDP2 in the same format (default: %(default)s)",
    )
    parser.add_argument(
        "--skip-unsupported", action="store_true", help=f"leave out engines with {SUFFIX} if they cannot run here"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    in_float8 = [engine for engine in options.engines if FLOAT8 in split_name(engine)[1]]
    reason = check_machine(options) if in_float8 else None
    if reason:
        print(f"float8.py: {reason}", file=sys.stderr)
        if not options.skip_unsupported:
            return 2
        options.engines = [engine for engine in options.engines if engine not in in_float8]
    results = run(options)
    show(results, options)
    problems = find_problems(results, options.tolerance)
    for problem in problems:
        print(f"float8.py: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
