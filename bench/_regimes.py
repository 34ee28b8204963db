"""Steps by regime, for figures.py: few tokens or many for each rank, on slow links and on fast ones.

A decoder of `BLOCKS` plain blocks of width `width` in bfloat16 trains on `composable_shard.testing.fabric`: compute is
declared (operations over the given TFLOP/s) and the link takes its modelled time, so figures are exact and have no
spread. The stand-in is narrow: its bytes and its times are those of the real width over the same factor, which is
multiplied back. Weights and gradients travel in 2 bytes a parameter.
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
BYTES, STORED_BYTES = 2, 4  # of a parameter on the wire, and in the stand-in
LATENCY_S = 20e-6
STEP_OPERATIONS = 2  # for a parameter and a token, forward


@dataclass(frozen=True)
class RegimeResult:
    """A step of an engine where ranks have so many tokens and links that bandwidth.

    Attributes:
        tokens: of a rank in a step.
        gbps: gigabits a second that a rank sends.
        engine: which; `ALONE` is what compute takes by itself.
        step_ms: milliseconds of forward and backward.
        tokens_s: tokens a second of one rank.
        share: of the step, in which compute waits for communication.
        over_fsdp2: the step over that of FSDP2.
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
    """A case of overlap.py whose compute follows from tokens, and whose link has a bandwidth of its own."""

    rate: float = 0.0  # seconds of a parameter in forward
    link: float = 0.0  # bytes per second

    def make(self) -> Model:
        return Model(256, [Dense(WIDTH, 4, self.rate) for _ in range(BLOCKS)], self.rate)

    @property
    def bandwidth(self) -> float:
        return self.link


def results_of(tokens: int, gbps: float, options: argparse.Namespace) -> list[RegimeResult]:
    """All engines in one regime."""
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
    """All regimes."""
    torch.set_num_threads(1)
    for tokens, gbps in itertools.product(options.tokens, options.gbps):
        yield from results_of(tokens, gbps, options)


def show(results: Sequence[RegimeResult], options: argparse.Namespace) -> None:
    """Prints a row a regime: the step of FSDP2, and the others over it."""
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
        f"A step by regime: tokens a rank, Gb/s a rank; {options.regime_world} ranks simulated",
        ("regime", "FSDP2, ms", "tokens / s a rank", "waits", *others),
        rows,
        f"{BLOCKS} blocks of width {options.width} in bfloat16, {options.teraflops:g} TFLOP/s, {1e6 * LATENCY_S:g} us; "
        "others: step over FSDP2's (share of their own step in which compute waits); exact, no spread; blocks that are "
        "compiled one by one follow the eager schedule",
    )
