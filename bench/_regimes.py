"""Steps by regime, for figures.py: few or many tokens per rank, on slow and fast links.

A decoder of `BLOCKS` plain blocks of width `width` in bfloat16 trains on `composable_shard.testing.fabric`. Compute is
declared (operations over the given TFLOP/s) and the link has modelled times, so figures are exact and have no spread.
The model that runs is narrower. Its bytes and times are divided by the same factor, and results are multiplied by it.
Weights and gradients are communicated with 2 bytes per parameter.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import _report
from _stand_ins import BLOCKS, WIDTH, Dense, Model, units_of
from overlap import Case, measure

ENGINES = ("fsdp2", "ours", "ours-auto", "ours-compiled", "ours-compiled-auto")
REFERENCE, ALONE = "fsdp2", "no communication"
BYTES, STORED_BYTES = 2, 4  # bytes per parameter: communicated, and in the narrow model
LATENCY_S = 20e-6
STEP_OPERATIONS = 2  # per parameter and token in forward


@dataclass(frozen=True)
class RegimeResult:
    """A step of an engine with a number of tokens and a bandwidth.

    Attributes:
        tokens: tokens per rank and step.
        gbps: gigabits per second that a rank sends.
        engine: name of the engine; `ALONE` is compute without communication.
        step_ms: time of forward and backward, in milliseconds.
        tokens_s: tokens per second of one rank.
        share: exposed communication as a share of the step.
        over_fsdp2: step time over that of FSDP2.
    """

    tokens: int
    gbps: float
    engine: str
    step_ms: float
    tokens_s: float
    share: float
    over_fsdp2: float


@dataclass(frozen=True)
class Regime(Case):
    """A case of overlap.py with compute times that depend on the tokens, and a given bandwidth."""

    rate: float = 0.0  # seconds per parameter in forward
    link: float = 0.0  # bandwidth in bytes per second

    def make(self) -> Model:
        return Model(256, [Dense(WIDTH, 4, self.rate) for _ in range(BLOCKS)], self.rate)

    @property
    def bandwidth(self) -> float:
        return self.link


def results_of(tokens: int, gbps: float, options: argparse.Namespace) -> list[RegimeResult]:
    """Measure all engines in one regime."""
    factor = (options.width / WIDTH) ** 2
    rate = STEP_OPERATIONS * tokens / (1e12 * options.teraflops)
    link = 1e9 / 8 * gbps * STORED_BYTES / BYTES
    case = Regime("uniform", 1.0, "streams", options.regime_world, LATENCY_S / factor, [], rate, link)
    units = units_of(case.make())
    compute_ms = 1e3 * factor * sum(unit.forward_s + unit.backward_s for unit in units)
    torch.compiler.reset()
    sides = measure(case, list(options.regime_engines), rounds=1)
    exposed = {ALONE: 0.0} | {side.name: factor * side.exposed[-1] for side in sides}
    reference = compute_ms + exposed[REFERENCE]
    return [
        RegimeResult(
            tokens=tokens,
            gbps=gbps,
            engine=name,
            step_ms=compute_ms + waits,
            tokens_s=tokens / (compute_ms + waits) * 1e3,
            share=waits / (compute_ms + waits),
            over_fsdp2=(compute_ms + waits) / reference,
        )
        for name, waits in exposed.items()
    ]


def regimes(options: argparse.Namespace) -> Iterator[RegimeResult]:
    """Measure all regimes."""
    torch.set_num_threads(1)
    for tokens, gbps in itertools.product(options.tokens, options.gbps):
        yield from results_of(tokens, gbps, options)


def show(results: Sequence[RegimeResult], options: argparse.Namespace) -> None:
    """Print a row per regime: the step of FSDP2, and the ratios of the other engines."""
    engines = list(dict.fromkeys(r.engine for r in results))
    by = {(r.tokens, r.gbps, r.engine): r for r in results}
    others = [name for name in engines if name != REFERENCE]
    rows = []
    for tokens, gbps in itertools.product(options.tokens, options.gbps):
        found = by[tokens, gbps, REFERENCE]
        first = [f"{tokens:,} at {gbps:g}", f"{found.step_ms:.1f}", f"{found.tokens_s:,.0f}", f"{found.share:.2f}"]
        cells = (by[tokens, gbps, name] for name in others)
        rows.append([*first, *(f"{each.over_fsdp2:.2f} ({each.share:.2f})" for each in cells)])
    _report.table(
        f"A step by regime: tokens per rank, Gb/s per rank; {options.regime_world} simulated ranks",
        ("regime", "FSDP2, ms", "tokens/s per rank", "exposed share", *others),
        rows,
        f"{BLOCKS} blocks of width {options.width} in bfloat16, {options.teraflops:g} TFLOP/s, {1e6 * LATENCY_S:g} us; "
        "other engines: step time over FSDP2's (exposed communication as a share of their step); exact, no spread; "
        "compiled blocks have the eager schedule",
    )
