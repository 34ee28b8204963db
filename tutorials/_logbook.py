"""The log of the demo: a line per step, progress on the terminal, and plots."""

import json
import resource
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from _console import Display
from _resume import read_rows, write_rows

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Moment:
    """The figures of a step. The same on all ranks."""

    step: int  # counted from 1
    progress: float  # 0 to 1
    loss: float  # nats per byte, mean of all ranks
    learning_rate: float
    gradient_norm: float
    seconds: float  # training time
    held_out: float | None = None  # nats per byte, if it was evaluated


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that this process holds on its device (on CPU: resident memory)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux: use the maximum so far
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Logbook:
    """Rank 0 writes a line per step to metrics.jsonl, and shows progress on the terminal.

    If a run resumes `after` a step, lines of later steps are deleted, because those steps are repeated.
    """

    def __init__(self, out: Path, tokens: int, device: torch.device, after: int = 0) -> None:
        self._rank_0 = dist.get_rank() == 0
        self._tokens, self._device = tokens, device  # tokens per step
        self._smooth: float | None = None
        self.display = Display(active=self._rank_0)
        self.rows: list[dict[str, float]] = []
        self._file = None
        if self._rank_0:
            out.mkdir(parents=True, exist_ok=True)
            self.rows = [row for row in read_rows(out / METRICS) if row["step"] <= after]
            write_rows(out / METRICS, self.rows)
            self._file = (out / METRICS).open("a", buffering=1)

    def say(self, text: str = "") -> None:
        self.display.say(text)

    def note(self, moment: Moment) -> None:
        row = {key: value for key, value in asdict(moment).items() if value is not None}
        row["tokens"] = moment.step * self._tokens
        row["memory_bytes"] = memory_in_use(self._device)
        self.rows.append(row)
        if self._file is not None:  # line-buffered, so Ctrl-C loses no line
            self._file.write(json.dumps(row) + "\n")
        self._smooth = 0.9 * (self._smooth or moment.loss) + 0.1 * moment.loss
        if moment.held_out is not None:
            self.say(f"held-out loss {moment.held_out:.3f} after {moment.seconds:.0f} s")
        self.display.progress(
            moment.progress,
            step=moment.step,
            loss=self._smooth,
            speed=row["tokens"] / moment.seconds,
            left=moment.seconds * (1 - moment.progress) / max(moment.progress, 1e-9),
        )

    def note_final(self, held_out: float) -> None:
        if self._file is not None:
            self.rows[-1]["held_out"] = held_out
            self._file.write(json.dumps({"step": self.rows[-1]["step"], "final": held_out}) + "\n")


class OneStep:
    """The plan and the record of one early step, with times. Other steps are not watched and have no overhead."""

    STEP = 3  # the first step records the order of the groups

    def __init__(self, model: torch.nn.Module, active: bool) -> None:
        self._model, self._active = model, active
        self.planned_and_done = None

    def note(self, moment: Moment) -> None:
        """Call this after each step. Starts watching before step `STEP` and stops after it."""
        if not self._active:
            return
        import composable_shard as cs

        if moment.step == self.STEP - 1:
            cs.watch(self._model)
        elif moment.step == self.STEP:
            self.planned_and_done = cs.make_plan(self._model), cs.last_record(self._model)
            cs.watch(self._model, False)


def draw(log: Logbook, bigram: float, planned_and_done, watched: OneStep, out: Path) -> None:
    """Draw loss.png and memory.png (the last step's memory, or resident memory over time without a record).

    If a step was watched, also write timeline.json.
    """
    from composable_shard.report import memory, timeline

    plot_loss(log.rows, bigram, out / "loss.png")
    if planned_and_done is None:
        plot_resident_memory(log.rows, out / "memory.png")
    else:
        plan, record = planned_and_done
        memory(plan, out / "memory.png", record)
        log.say(f"memory of a step: {out / 'memory.png'}")
    if watched.planned_and_done is not None:
        plan, record = watched.planned_and_done
        timeline(plan, record, out / "timeline.json")
        log.say(f"timeline of a step, for https://ui.perfetto.dev: {out / 'timeline.json'}")


def plot_loss(rows: list[dict[str, float]], bigram: float, path: Path) -> None:
    """Plot the loss of each step, raw and smoothed, the held-out losses, and the bigram entropy."""
    from _pictures import BLUE, RED, SAND, picture

    steps = [row["step"] for row in rows if "loss" in row]
    losses = [row["loss"] for row in rows if "loss" in row]
    measured = [(row["step"], row["held_out"]) for row in rows if "held_out" in row]
    with picture(path, 7.0, 4.5) as axes:
        axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(losses), color=BLUE, label="training")
        if measured:
            axes.plot(*zip(*measured, strict=True), "o-", color=RED, label="held out")
        axes.axhline(bigram, color=SAND, linestyle="--", label=f"bigram entropy {bigram:.2f}")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per byte)")
        axes.legend(frameon=False)


def plot_resident_memory(rows: list[dict[str, float]], path: Path) -> None:
    """Plot the memory of this process over the training."""
    from _pictures import BLUE, picture

    points = [(row["seconds"], row["memory_bytes"] / 2**20) for row in rows if "memory_bytes" in row]
    with picture(path, 7.0, 4.5) as axes:
        axes.plot(*zip(*points, strict=True), color=BLUE)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("memory of one process (MiB)")


def smooth(values: list[float], weight: float = 0.95) -> list[float]:
    """Return a moving average without a bias toward zero at the beginning."""
    averages, total, share = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        share = weight * share + (1 - weight)
        averages.append(total / share)
    return averages
