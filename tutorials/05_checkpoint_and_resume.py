"""Kill a training run during a save and during a step, and resume it with bitwise identical losses.

    python tutorials/05_checkpoint_and_resume.py   # half a minute

The script trains a small GPT on two processes, twice. The first run is not interrupted. The second run is killed with
SIGKILL: first both ranks while they write a checkpoint, then one rank during a step. Each time, the same call restarts
it from the last committed checkpoint. Its losses are bitwise identical to those of the first run.

Then one process, and three, resume from a checkpoint of two. Their losses agree within fp32 rounding.
runs/05/losses.png shows all runs.

`train` has everything that a training script needs. The rest of the file is the experiment.
"""

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

import composable_shard as cs
from _gpt import Block, build_gpt, next_byte_loss, random_windows
from _pictures import BLUE, GREEN, GREY, RED, SAND, picture
from composable_shard import checkpoint

LOSSES = "losses.txt"
WINDOWS = 12  # per step on all ranks together, so that the data do not depend on the number of ranks
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


# ------------------------------------------------------------------------------------- a rank


@dataclass(frozen=True)
class Run:
    """A training run: directory of checkpoints and losses, number of steps, steps between checkpoints."""

    folder: Path
    steps: int
    save_every: int


def train(rank: int, world: int, run: Run) -> None:
    """Train to the last step. Start from the latest checkpoint of the run if there is one."""
    model = build_gpt("tiny")
    cs.shard_by_class(model, {Block}, strategy="zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    data = torch.Generator().manual_seed(0)  # draws the windows of text
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": data,
        "random": checkpoint.RandomState(),  # unused in this model; needed with dropout
        "step": 0,
    }
    if checkpoint.latest(run.folder) is not None:
        checkpoint.load(run.folder, state)
        say(f"rank {rank} of {world} resumed after step {state['step']}", rank)

    while state["step"] < run.steps:
        windows = random_windows(TEXT, WINDOWS, model.config.context + 1, data)[rank::world]
        loss = next_byte_loss(model, windows)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state["step"] += 1
        note(loss.detach(), state["step"], rank, run.folder)
        if state["step"] % run.save_every == 0:
            checkpoint.save(run.folder, state, step=state["step"], keep=run.steps)  # keep all checkpoints


def note(loss: torch.Tensor, step: int, rank: int, folder: Path) -> None:
    """Append the exact mean loss of all ranks to a file on rank 0."""
    dist.all_reduce(loss)
    if rank == 0:
        with (folder / LOSSES).open("a") as file:
            file.write(f"{step} {(loss.item() / dist.get_world_size()).hex()}\n")


def say(text: str, rank: int = 0) -> None:
    if rank == 0:
        print(f"  {text}", flush=True)


def rank_main(rank: int, world: int, run: Run, store: str) -> None:
    """Join the process group and train. Runs in each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        train(rank, world, run)
    except RuntimeError as error:  # the connection to a killed rank was lost
        say(f"rank {rank} ended: {str(error).splitlines()[0][:90]}")
        sys.exit(1)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------ the experiment


def start(world: int, run: Run) -> list[BaseProcess]:
    """Start the ranks of a run. They are forked from a process that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "composable_shard.checkpoint"])
    run.folder.mkdir(parents=True, exist_ok=True)
    store = run.folder.parent / f"store-{time.monotonic_ns()}"  # a new one for each start
    ranks = [context.Process(target=rank_main, args=(rank, world, run, str(store))) for rank in range(world)]
    for each in ranks:
        each.start()
    return ranks


def finish(ranks: list[BaseProcess]) -> None:
    for each in ranks:
        each.join()
    assert all(each.exitcode == 0 for each in ranks), "a rank failed"


def kill(ranks: list[BaseProcess]) -> None:
    for each in ranks:
        each.kill()  # SIGKILL
    for each in ranks:
        each.join()


def wait_until(happens: Callable[[], object], ranks: list[BaseProcess]) -> None:
    while not happens():
        assert all(each.is_alive() for each in ranks), "a rank ended unexpectedly"
        time.sleep(0.0005)


def unfinished(run: Run) -> set[str]:
    """Return the directories of saves that were not committed."""
    return {path.name for path in run.folder.glob(".step-*")}


def starts(run: Run) -> list[dict[int, float]]:
    """Return the losses by step for each start of the run that finished a step."""
    path, curves = run.folder / LOSSES, [{}]
    for line in path.read_text().splitlines() if path.exists() else ():
        step, loss = line.split()
        if int(step) <= max(curves[-1], default=0):  # the run was restarted from a checkpoint
            curves.append({})
        curves[-1][int(step)] = float.fromhex(loss)
    return curves


def losses(run: Run) -> dict[int, float]:
    """Return the loss of each step."""
    curve: dict[int, float] = {}
    for step, loss in (pair for each in starts(run) for pair in each.items()):
        assert curve.setdefault(step, loss) == loss, f"step {step} was repeated with another loss"
    return curve


def kill_in_a_save(run: Run) -> None:
    left: set[str] = set()
    while not left:  # if the save finished before the kill, try again
        ranks = start(2, run)
        wait_until(lambda: len(losses(run)) > run.steps // 4 and unfinished(run), ranks)
        kill(ranks)
        left = unfinished(run)
    say(f"killed both ranks; unfinished save, ignored: {', '.join(left)}")


def kill_in_a_step(run: Run) -> None:
    ranks = start(2, run)
    step = (checkpoint.latest(run.folder) or 0) + run.save_every + 2
    wait_until(lambda: max(losses(run), default=0) >= step, ranks)
    ranks[1].kill()
    say(f"killed rank 1 after step {step}")
    ranks[0].join(10)  # rank 0 raises an error because its peer is lost
    kill(ranks)


def compare(one: Run, other: Run) -> float:
    """Print two loss curves. Return their largest relative difference."""
    left, right = losses(one), losses(other)
    for step in sorted(right):
        if step % one.save_every == 0:
            say(f"step {step:3}  uninterrupted {left[step]:.9f}  this run {right[step]:.9f}")
    return max(abs(left[step] - right[step]) / left[step] for step in right)


def draw(plain: Run, killed: Run, others: dict[int, Run], path: Path) -> None:
    """Plot the losses of all starts, and the relative differences for other numbers of ranks."""
    whole = losses(plain)
    with picture(path, 9, 5, rows=2, sharex=True, height_ratios=(3, 1)) as (above, below):
        above.plot([*whole], [*whole.values()], color=GREY, linewidth=7, label="uninterrupted")
        begins = starts(killed)
        for number, curve in enumerate(begins):
            color = (BLUE, SAND, GREEN)[number % 3]
            above.plot([*curve], [*curve.values()], ".-", color=color, label=f"killed run, start {number + 1}")
        for curve in begins[:-1]:
            above.plot(max(curve), curve[max(curve)], "x", color=RED, markersize=11, markeredgewidth=2.5)
        above.set_ylabel("loss, nats per byte (x: killed)")
        above.legend(frameon=False, fontsize=8)
        for world, run in others.items():
            apart = {step: abs(loss - whole[step]) / whole[step] for step, loss in losses(run).items()}
            below.plot([*apart], [*apart.values()], ".-", label=f"{world} rank{'s' * (world > 1)}")
        below.set_ylabel("relative difference")
        below.set_xlabel("step")
        below.legend(frameon=False, fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    out = options.out.absolute()
    shutil.rmtree(out, ignore_errors=True)

    def run_in(name: str) -> Run:
        return Run(out / name, options.steps, options.save_every)

    plain, killed = run_in("undisturbed"), run_in("killed")
    print("two ranks, uninterrupted", flush=True)
    finish(start(2, plain))
    print("two ranks, killed during a save", flush=True)
    kill_in_a_save(killed)
    print("restarted, one rank killed during a step", flush=True)
    kill_in_a_step(killed)
    print("restarted", flush=True)
    finish(start(2, killed))
    whole = checkpoint.verify(killed.folder)
    say(
        f"{whole.path.name} is complete: {whole.files} files, {whole.bytes:,} bytes; "
        f"{len(unfinished(killed))} unfinished saves"
    )
    compare(plain, killed)
    equal = losses(plain) == losses(killed)
    print(f"all {options.steps} losses are {'' if equal else 'NOT '}bitwise identical", flush=True)

    others = {world: run_in(f"world-{world}") for world in options.worlds}
    from_step = options.steps // 2 // options.save_every * options.save_every
    near = True
    for world, run in others.items():
        print(f"{world} rank{'s' * (world > 1)}, from the checkpoint of two ranks at step {from_step}", flush=True)
        name = f"step-{from_step:08d}"
        shutil.copytree(plain.folder / name, run.folder / name)  # a checkpoint is a plain directory
        finish(start(world, run))
        apart = compare(plain, run)
        near &= apart < 1e-4
        print(f"{world} rank{'s' * (world > 1)}: the largest relative difference of losses is {apart:.0e}", flush=True)
    draw(plain, killed, others, out / "losses.png")
    print(f"losses of all runs: {options.out / 'losses.png'}", flush=True)
    return 0 if equal and near else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Kill a training run and resume it with the same losses.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/05"), help="directory of checkpoints; emptied first")
    add("--steps", type=int, default=40, help="training steps, at least four times --save-every")
    add("--save-every", type=int, default=5, help="steps between checkpoints, at least 3")
    add("--worlds", type=int, nargs="*", default=[1, 3], help="other numbers of ranks that resume, at most 12")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
