"""One rank of `faults.py`: train a sharded GPT, perform the action of a case, and print the outcome."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import _engines
from _models import GPT, GPTBlock, GPTConfig

LIMIT_S = 8.0
CONFIG = {"depth": 3, "width": 32, "heads": 2, "context": 8, "vocabulary": 32}


class Run:
    """A sharded model with its optimizer, and an unsharded model that trains on the data of all ranks."""

    def __init__(self, engine: str) -> None:
        self.rank, self.world, self.at = dist.get_rank(), dist.get_world_size(), 0
        self.mesh = init_device_mesh("cpu", (self.world,))
        self.engine = engine
        self.model, self.plain = self.made(), self._gpt()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._reference = torch.optim.AdamW(self.plain.parameters(), lr=1e-2)

    def made(self) -> Any:
        return _engines.ENGINES[self.engine](self._gpt(), GPTBlock, self.mesh)

    def _gpt(self) -> nn.Module:
        torch.manual_seed(0)
        return GPT(GPTConfig(**CONFIG))

    def tokens(self, rank: int, length: int = 9) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.at + rank)
        return torch.randint(0, 32, (2, length), generator=generator)

    def loss(self, model: nn.Module | None = None, rank: int | None = None) -> Tensor:
        tokens = self.tokens(self.rank if rank is None else rank)
        logits = (model or self.model)(tokens[:, :-1])
        logits = logits[0] if isinstance(logits, tuple) else logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def step(self) -> None:
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        for rank in range(self.world):
            (self.loss(self.plain, rank) / self.world).backward()  # type: ignore[no-untyped-call]
        self._reference.step()
        self._reference.zero_grad()
        self.at += 1

    def is_exact(self) -> bool:
        for ours, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            if not torch.allclose(ours.full_tensor(), theirs, atol=1e-5):
                return False
        return True


def alone(act: Callable[[Run], object]) -> Callable[[Run], None]:
    """Perform an action only on rank 1."""

    def do(run: Run) -> None:
        if run.rank == 1:
            act(run)

    return do


def blocks(run: Run) -> nn.ModuleList:
    return next(child for child in run.model.modules() if isinstance(child, nn.ModuleList))


def leave_a_layer_out(run: Run) -> None:
    kept = [block for at, block in enumerate(blocks(run)) if at != 1]
    names = [name for name, child in run.model.named_modules() if child is blocks(run)]
    owner = run.model.get_submodule(names[0].rpartition(".")[0])
    setattr(owner, names[0].rpartition(".")[2], nn.ModuleList(kept))


def evaluate(run: Run) -> None:
    with torch.no_grad():
        run.loss()


def fail_in_forward(run: Run) -> None:
    run.model(torch.full((2, 8), 99))


def fail_and_go_on(run: Run) -> None:
    with contextlib.suppress(IndexError):
        fail_in_forward(run)


def fail_in_backward(run: Run) -> None:
    blocks(run)[1].register_forward_hook(_raise_in_backward)
    run.loss().backward()  # type: ignore[no-untyped-call]


def _raise_in_backward(_module: nn.Module, _args: object, out: Tensor) -> None:
    out.register_hook(_raise)


def _raise(_gradient: object) -> None:
    raise ValueError("bad data")


def fail(run: Run) -> None:
    _raise(None)


def skip_the_step(run: Run) -> None:
    run.loss().backward()  # type: ignore[no-untyped-call]
    if run.rank == 0:
        run.optimizer.step()
    run.optimizer.zero_grad()


def more_micro_batches(run: Run) -> None:
    for _ in range(1 + run.rank):
        run.loss().backward()  # type: ignore[no-untyped-call]
    run.optimizer.zero_grad()


def other_order_of_models(run: Run) -> None:
    other = run.made()
    run.loss(other)
    for model in (other, run.model) if run.rank else (run.model, other):
        run.loss(model).backward()  # type: ignore[no-untyped-call]
    run.optimizer.zero_grad()


def full_tensor(run: Run) -> None:
    next(run.model.parameters()).full_tensor()


def kill(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(run: Run) -> None:
    sys.exit(0)


def be_late(run: Run) -> None:
    time.sleep(1.5 * LIMIT_S)


def stop_for_a_while(run: Run) -> None:
    time.sleep(0.4 * LIMIT_S)


def learn_faster(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 1.0


def drop_a_gradient(run: Run) -> None:
    run.loss().backward()  # type: ignore[no-untyped-call]
    if run.rank == 1:
        next(blocks(run).parameters()).grad = None
    run.optimizer.step()
    run.optimizer.zero_grad()


# Each case, and whether training should continue with exact results. Otherwise it should end with an error.
CASES: dict[str, tuple[Callable[[Run], object], bool]] = {
    "all ranks fail in a forward, and go on": (fail_and_go_on, True),
    "one rank is slow for some seconds": (alone(stop_for_a_while), True),
    "one rank leaves a layer out": (alone(leave_a_layer_out), False),
    "one rank evaluates alone": (alone(evaluate), False),
    "one rank skips an optimizer step": (skip_the_step, False),
    "one rank has another learning rate": (alone(learn_faster), False),
    "one rank drops a gradient": (drop_a_gradient, False),
    "one rank runs a micro-batch more": (more_micro_batches, False),
    "ranks run two models in another order": (other_order_of_models, False),
    "one rank fails in a forward, and tries again": (alone(fail_and_go_on), False),
    "one rank fails in a forward": (alone(fail_in_forward), False),
    "one rank fails in a backward": (alone(fail_in_backward), False),
    "one rank fails between steps": (alone(fail), False),
    "one rank calls full_tensor alone": (alone(full_tensor), False),
    "one rank ends": (alone(leave), False),
    "one rank is killed": (alone(kill), False),
    "one rank is later than the limit": (alone(be_late), False),
}


def main() -> None:
    engine, case = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    run = Run(engine)
    for _ in range(2):
        run.step()
    dist.barrier()
    begin, said = time.monotonic(), {"rank": run.rank, "kind": "", "text": ""}
    try:
        CASES[case][0](run)
        for _ in range(2):
            run.step()
        said["exact"] = run.is_exact()
    except BaseException as error:
        named = [each.__name__ for each in type(error).__mro__]
        said |= {"kind": type(error).__name__, "text": str(error), "ours": "ComposableShardError" in named}
        raise
    finally:
        print(json.dumps(said | {"after": time.monotonic() - begin}), flush=True)


if __name__ == "__main__":
    main()
