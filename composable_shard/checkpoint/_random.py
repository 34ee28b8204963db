"""Save and load the state of all random number generators of each rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ._state import PerRank


class RandomState(PerRank):
    """The random generators of every rank: of Python, of NumPy, and of torch for the CPU and the current accelerator.

    Put one into the state that you save and load. If the number of ranks changes, ranks that existed before continue
    with their own generators. New ranks are seeded from rank 0's generator and their rank.
    """

    def __init__(self) -> None:
        super().__init__(_Generators(), _resize)


class _Generators:
    """Reads and sets the generators."""

    def state_dict(self) -> dict[str, Any]:
        _, words, gauss = random.getstate()
        _, keys, position, has_gauss, cached = np.random.get_state()
        state: dict[str, Any] = {
            "python": [torch.tensor(words, dtype=torch.int64), gauss],
            "numpy": [
                torch.from_numpy(np.asarray(keys).astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ],
            "torch": torch.get_rng_state(),
        }
        if torch.accelerator.is_available():
            state["accelerator"] = _module().get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        words, gauss = state["python"]
        random.setstate((3, tuple(words.tolist()), gauss))
        keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        if "accelerator" in state and torch.accelerator.is_available():
            _module().set_rng_state(state["accelerator"])


def _module() -> Any:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.get_device_module(device)


def _resize(saved: list[dict[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    if rank < len(saved):
        return saved[rank]
    generator = torch.Generator()
    generator.set_state(saved[0]["torch"])
    seeds = torch.randint(2**31, (rank + 1,), generator=generator)
    seed = int(seeds[rank])
    words = random.Random(seed).getstate()[1]
    keys: Any = np.random.RandomState(seed).get_state()
    made = {
        "python": [torch.tensor(words, dtype=torch.int64), None],
        "numpy": [torch.from_numpy(np.asarray(keys[1]).astype(np.int64)), int(keys[2]), 0, 0.0],
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if "accelerator" in saved[0] and torch.accelerator.is_available():
        made["accelerator"] = torch.Generator(torch.accelerator.current_accelerator()).manual_seed(seed).get_state()
    return made
