"""One rank of `planner.py`: measure the machine, and memory and time of real steps."""

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import _launch
from composable_shard import shard_auto
from composable_shard.planner import Layout, Shape, Strategy, checkpoint_modules
from composable_shard.planner.decoder import Decoder, loss_of
from composable_shard.planner.live import LiveBytes
from composable_shard.planner.measuring import Settings, measure
from composable_shard.planner.ranks import Place
from composable_shard.planner.sources import named_blocks

WARM_STEPS = 2


class Job:
    """A sharded model with its AdamW."""

    def __init__(self, shape: Shape, strategy: Strategy, sequences: int) -> None:
        torch.manual_seed(0)
        self.model = Decoder(shape)
        checkpoint_modules(named_blocks(self.model).values(), strategy.checkpointing)
        shard_auto(self.model, strategy=strategy.name, replicas=strategy.layout.replicas)  # type: ignore[arg-type]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(0, shape.vocabulary, (sequences, shape.sequence + 1))

    def step(self) -> None:
        loss_of(self.model, self.tokens).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bytes(self) -> int:
        """Return the peak of the bytes of all storages in a step."""
        with LiveBytes() as counter:
            counter.note(self.model.parameters())
            for _ in range(2):  # the first step registers storages that already exist
                counter.reset()
                self.step()
        return counter.peak

    def seconds(self) -> float:
        """Return the time of a step on the slowest rank, in seconds."""
        dist.barrier()
        begin = time.perf_counter()
        self.step()
        took = time.perf_counter() - begin
        return float(_launch.everyone(torch.tensor(took, dtype=torch.float64)).max())


def machine_of(rank: int, world: int) -> str:
    """Measure the machine now, like `measure-links`. Return JSON."""
    place = Place(rank, world, rank, world)
    return measure(place, torch.device("cpu"), Settings(), None, lambda *_: None).machine.to_json()


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    rank, world = _launch.join()
    torch.set_num_threads(1)
    shape = Shape(**settings["shape"])
    listed = [Strategy(**{**each, "layout": Layout(**each["layout"])}) for each in settings["strategies"]]
    found: list[dict[str, Any]] = []
    machines = [machine_of(rank, world)]
    for strategy in listed:
        job = Job(shape, strategy, settings["sequences"])
        for _ in range(WARM_STEPS):
            job.step()
        nbytes = job.bytes()
        seconds = [job.seconds() for _ in range(settings["rounds"])]
        found.append({"bytes": nbytes, "seconds": statistics.median(seconds)})
        del job
        machines.append(machine_of(rank, world))
    if rank == 0:
        _launch.answer(json.dumps({"machines": machines, "strategies": found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
