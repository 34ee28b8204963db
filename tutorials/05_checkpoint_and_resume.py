"""Kill a training in the middle of a save and in the middle of a step, and see it go on to the bit.

    python tutorials/05_checkpoint_and_resume.py   # half a minute

The script trains a small GPT on two processes, once undisturbed and once killed with SIGKILL, which no
program can answer: first both ranks while they write a checkpoint, then one of them within a step. Each
time the run is started again by the same call, and goes on from the checkpoint that was committed last.
In the end it has the losses of the undisturbed run, bit by bit. Then one process, and three, go on from
a checkpoint of two, and agree with it within the rounding of float32. runs/05/losses.png shows all of them.

`train` is what a rank does, and all that a training script needs. The rest is the experiment.
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
WINDOWS = 12  # a step, on all ranks together, so that another number of ranks trains on the same
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


# ------------------------------------------------------------------------------------- a rank


@dataclass(frozen=True)
class Run:
    """A training: the directory of its checkpoints and losses, its steps, and those between two checkpoints."""

    folder: Path
    steps: int
    save_every: int


def train(rank: int, world: int, run: Run) -> None:
    """Train to the last step, from the latest checkpoint of the run if there is one."""
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
        "random": checkpoint.RandomState(),  # nothing here draws from it; dropout would
        "step": 0,
    }
    if checkpoint.latest(run.folder) is not None:
        checkpoint.load(run.folder, state)
        say(f"rank {rank} of {world} goes on after step {state['step']}", rank)

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
            checkpoint.save(run.folder, state, step=state["step"], keep=run.steps)  # all, for the experiment


def note(loss: torch.Tensor, step: int, rank: int, folder: Path) -> None:
    """Rank 0 writes the mean loss of all ranks down, with every bit."""
    dist.all_reduce(loss)
    if rank == 0:
        with (folder / LOSSES).open("a") as file:
            file.write(f"{step} {(loss.item() / dist.get_world_size()).hex()}\n")


def say(text: str, rank: int = 0) -> None:
    if rank == 0:
        print(f"  {text}", flush=True)


def rank_main(rank: int, world: int, run: Run, store: str) -> None:
    """What a process does: find the others, and train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        train(rank, world, run)
    except RuntimeError as error:  # the connection to a rank that was killed
        say(f"rank {rank} has ended: {str(error).splitlines()[0][:90]}")
        sys.exit(1)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------ the experiment


def start(world: int, run: Run) -> list[BaseProcess]:
    """Start the ranks of a run; they are forked off a process that has loaded torch already."""
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
    assert all(each.exitcode == 0 for each in ranks), "a rank has failed"


def kill(ranks: list[BaseProcess]) -> None:
    for each in ranks:
        each.kill()  # SIGKILL
    for each in ranks:
        each.join()


def wait_until(happens: Callable[[], object], ranks: list[BaseProcess]) -> None:
    while not happens():
        assert all(each.is_alive() for each in ranks), "a rank has ended"
        time.sleep(0.0005)


def unfinished(run: Run) -> set[str]:
    """Saves that have begun and were not committed."""
    return {path.name for path in run.folder.glob(".step-*")}


def starts(run: Run) -> list[dict[int, float]]:
    """The losses by step of each start that came as far as a step."""
    path, curves = run.folder / LOSSES, [{}]
    for line in path.read_text().splitlines() if path.exists() else ():
        step, loss = line.split()
        if int(step) <= max(curves[-1], default=0):  # it has gone on from a checkpoint before
            curves.append({})
        curves[-1][int(step)] = float.fromhex(loss)
    return curves


def losses(run: Run) -> dict[int, float]:
    """The loss of each step."""
    curve: dict[int, float] = {}
    for step, loss in (pair for each in starts(run) for pair in each.items()):
        assert curve.setdefault(step, loss) == loss, f"step {step} was done again, and came out otherwise"
    return curve


def kill_in_a_save(run: Run) -> None:
    left: set[str] = set()
    while not left:  # should a save be over before the kill arrives, the next one is tried
        ranks = start(2, run)
        wait_until(lambda: len(losses(run)) > run.steps // 4 and unfinished(run), ranks)
        kill(ranks)
        left = unfinished(run)
    say(f"both ranks killed; left behind: {', '.join(left)}, which does not count")


def kill_in_a_step(run: Run) -> None:
    ranks = start(2, run)
    step = (checkpoint.latest(run.folder) or 0) + run.save_every + 2
    wait_until(lambda: max(losses(run), default=0) >= step, ranks)
    ranks[1].kill()
    say(f"rank 1 killed after step {step}")
    ranks[0].join(10)  # it notices that its peer is gone
    kill(ranks)


def compare(one: Run, other: Run) -> float:
    """Print two curves; gives by how much they differ at most, relatively."""
    left, right = losses(one), losses(other)
    for step in sorted(right):
        if step % one.save_every == 0:
            say(f"step {step:3}  undisturbed {left[step]:.9f}  here {right[step]:.9f}")
    return max(abs(left[step] - right[step]) / left[step] for step in right)


def draw(plain: Run, killed: Run, others: dict[int, Run], path: Path) -> None:
    """The losses of every start over those of the undisturbed run, and how far other numbers of ranks are from it."""
    whole = losses(plain)
    with picture(path, 9, 5, rows=2, sharex=True, height_ratios=(3, 1)) as (above, below):
        above.plot([*whole], [*whole.values()], color=GREY, linewidth=7, label="undisturbed")
        begins = starts(killed)
        for number, curve in enumerate(begins):
            color = (BLUE, SAND, GREEN)[number % 3]
            above.plot([*curve], [*curve.values()], ".-", color=color, label=f"killed run, start {number + 1}")
        for curve in begins[:-1]:
            above.plot(max(curve), curve[max(curve)], "x", color=RED, markersize=11, markeredgewidth=2.5)
        above.set_ylabel("loss, nats a byte (x: killed)")
        above.legend(frameon=False, fontsize=8)
        for world, run in others.items():
            apart = {step: abs(loss - whole[step]) / whole[step] for step, loss in losses(run).items()}
            below.plot([*apart], [*apart.values()], ".-", label=f"{world} rank{'s' * (world > 1)}")
        below.set_ylabel("apart, relatively")
        below.set_xlabel("step")
        below.legend(frameon=False, fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    out = options.out.absolute()
    shutil.rmtree(out, ignore_errors=True)

    def run_in(name: str) -> Run:
        return Run(out / name, options.steps, options.save_every)

    plain, killed = run_in("undisturbed"), run_in("killed")
    print("two ranks, undisturbed", flush=True)
    finish(start(2, plain))
    print("two ranks, killed while they save", flush=True)
    kill_in_a_save(killed)
    print("started again, and one of them killed within a step", flush=True)
    kill_in_a_step(killed)
    print("started again", flush=True)
    finish(start(2, killed))
    whole = checkpoint.verify(killed.folder)
    say(
        f"{whole.path.name} is whole: {whole.files} files, {whole.bytes:,} bytes; {len(unfinished(killed))} left behind"
    )
    compare(plain, killed)
    equal = losses(plain) == losses(killed)
    print(f"all {options.steps} losses are {'equal, bit by bit' if equal else 'NOT EQUAL'}", flush=True)

    others = {world: run_in(f"world-{world}") for world in options.worlds}
    from_step = options.steps // 2 // options.save_every * options.save_every
    near = True
    for world, run in others.items():
        print(f"number of ranks {world}, from step {from_step} of two", flush=True)
        name = f"step-{from_step:08d}"
        shutil.copytree(plain.folder / name, run.folder / name)  # a checkpoint is a directory like any other
        finish(start(world, run))
        apart = compare(plain, run)
        near &= apart < 1e-4
        print(f"number of ranks {world}: losses differ by {apart:.0e} at most, relatively", flush=True)
    draw(plain, killed, others, out / "losses.png")
    print(f"all of these losses: {options.out / 'losses.png'}", flush=True)
    return 0 if equal and near else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Kill a training, and see it go on to the same losses.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/05"), help="where the checkpoints go; emptied before")
    add("--steps", type=int, default=40, help="of a training, at least four times --save-every")
    add("--save-every", type=int, default=5, help="steps between checkpoints, at least three")
    add("--worlds", type=int, nargs="*", default=[1, 3], help="other numbers of ranks that go on, of at most 12")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
