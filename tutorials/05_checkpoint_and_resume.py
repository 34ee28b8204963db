"""Kill a training in the middle of a save and in the middle of a step, and see it go on to the bit.

    python tutorials/05_checkpoint_and_resume.py   # half a minute

The script trains a small GPT on two processes, once undisturbed and once killed with SIGKILL, which no
program can answer: first both ranks while they write a checkpoint, then one of them within a step. Each
time the run is started again by the same call, and goes on from the checkpoint that was committed last.
In the end it has the losses of the undisturbed run, bit by bit. Then one process, and three, go on from
a checkpoint of two, and agree with it within the rounding of float32.

`train` is what a rank does, and all that a training script needs. The rest is the experiment.
"""

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

import composable_shard as cs
from _gpt import Block, build_gpt, next_byte_loss, random_windows
from composable_shard import checkpoint

STEPS, SAVE_EVERY = 40, 5
WINDOWS = 12  # a step, on all ranks together, so that another number of ranks trains on the same
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


# ------------------------------------------------------------------------------------- a rank


def train(rank: int, world: int, run: Path) -> None:
    """Train to the last step, from the latest checkpoint in the directory `run` if there is one."""
    model = build_gpt("tiny")
    cs.shard_by_class(model, {Block}, strategy="zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = torch.Generator().manual_seed(0)  # draws the windows of text
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": data,
        "random": checkpoint.RandomState(),  # nothing here draws from it; dropout would
        "step": 0,
    }
    if checkpoint.latest(run) is not None:
        checkpoint.load(run, state)
        say(f"rank {rank} of {world} goes on after step {state['step']}", rank)

    while state["step"] < STEPS:
        windows = random_windows(TEXT, WINDOWS, model.config.context + 1, data)[rank::world]
        loss = next_byte_loss(model, windows)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state["step"] += 1
        note(loss.detach(), state["step"], rank, run)
        if state["step"] % SAVE_EVERY == 0:
            checkpoint.save(run, state, step=state["step"], keep=STEPS)  # all of them, for the experiment


def note(loss: torch.Tensor, step: int, rank: int, run: Path) -> None:
    """Rank 0 writes the mean loss of all ranks down, with every bit."""
    dist.all_reduce(loss)
    if rank == 0:
        with (run / "losses.txt").open("a") as file:
            file.write(f"{step} {(loss.item() / dist.get_world_size()).hex()}\n")


def say(text: str, rank: int = 0) -> None:
    if rank == 0:
        print(f"  {text}", flush=True)


def rank_main(rank: int, world: int, run: Path, store: str) -> None:
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


def start(world: int, run: Path) -> list[BaseProcess]:
    """Start the ranks of a run; they are forked off a process that has loaded torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "composable_shard.checkpoint"])
    run.mkdir(parents=True, exist_ok=True)
    store = run.parent / f"store-{time.monotonic_ns()}"  # a new one for each start
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


def unfinished(run: Path) -> set[str]:
    """Saves that have begun and were not committed."""
    return {path.name for path in run.glob(".step-*")}


def losses(run: Path) -> dict[int, float]:
    """The loss of each step."""
    path = run / "losses.txt"
    curve: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        step, loss = line.split()
        loss_before = curve.setdefault(int(step), float.fromhex(loss))
        assert loss_before == float.fromhex(loss), f"step {step} was done again, and came out otherwise"
    return curve


def kill_in_a_save(run: Path) -> None:
    left: set[str] = set()
    while not left:  # should a save be over before the kill arrives, the next one is tried
        ranks = start(2, run)
        wait_until(lambda: len(losses(run)) > 12 and unfinished(run), ranks)
        kill(ranks)
        left = unfinished(run)
    say(f"both ranks killed; left behind: {', '.join(left)}, which does not count")


def kill_in_a_step(run: Path) -> None:
    ranks = start(2, run)
    step = (checkpoint.latest(run) or 0) + SAVE_EVERY + 2
    wait_until(lambda: max(losses(run), default=0) >= step, ranks)
    ranks[1].kill()
    say(f"rank 1 killed after step {step}")
    ranks[0].join(10)  # it notices that its peer is gone
    kill(ranks)


def compare(one: dict[int, float], other: dict[int, float]) -> float:
    """Print two curves; gives by how much they differ at most, relatively."""
    for step in sorted(other):
        if step % SAVE_EVERY == 0:
            say(f"step {step:3}  undisturbed {one[step]:.9f}  here {other[step]:.9f}")
    return max(abs(one[step] - other[step]) / one[step] for step in other)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill a training, and see it go on to the same losses.")
    parser.add_argument("--out", type=Path, default=Path("runs/05"), help="where the checkpoints go; emptied before")
    out = parser.parse_args(arguments).out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    plain, killed = out / "undisturbed", out / "killed"

    print("two ranks, undisturbed", flush=True)
    finish(start(2, plain))
    print("two ranks, killed while they save", flush=True)
    kill_in_a_save(killed)
    print("started again, and one of them killed within a step", flush=True)
    kill_in_a_step(killed)
    print("started again", flush=True)
    finish(start(2, killed))
    whole = checkpoint.verify(killed)
    say(
        f"{whole.path.name} is whole: {whole.files} files, {whole.bytes:,} bytes; {len(unfinished(killed))} left behind"
    )
    compare(losses(plain), losses(killed))
    equal = losses(plain) == losses(killed)
    print(f"all {STEPS} losses are {'equal, bit by bit' if equal else 'NOT EQUAL'}", flush=True)

    near = True
    for world in (1, 3):
        print(f"number of ranks {world}, from step {STEPS // 2} of two", flush=True)
        run, name = out / f"world-{world}", f"step-{STEPS // 2:08d}"
        shutil.copytree(plain / name, run / name)  # a checkpoint is a directory like any other
        finish(start(world, run))
        apart = compare(losses(plain), losses(run))
        near &= apart < 1e-4
        print(f"number of ranks {world}: losses differ by {apart:.0e} at most, relatively", flush=True)
    return 0 if equal and near else 1


if __name__ == "__main__":
    sys.exit(main())
