"""Compile a sharded model on one rank of a simulated world of two, save the results, and print cache statistics."""

import json
import os
import sys
import warnings

import torch

import composable_shard as cs
from composable_shard import testing


def model_of(*shapes: tuple[int, int], gathers_again: bool = True, **options: object) -> torch.nn.Module:
    """Linear layers of these shapes; by default the two that are compiled. The root owns the last one and keeps it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(*shape) for shape in shapes or [(8, 8), (8, 6)]])
    for layer in model[:-1]:
        cs.fully_shard(layer, reshard_after_forward=gathers_again, **options)
    cs.fully_shard(model, **options)
    return model


def step(run: torch.nn.Module, rank: int) -> torch.Tensor:
    """Run forward and backward on this rank's inputs. Returns the loss."""
    loss = run(torch.arange(32.0).view(4, 8).sin() * (rank + 1)).square().mean()
    loss.backward()
    return loss.detach()


def cache_counts() -> dict[str, int]:
    """Hits, misses and bypasses of AOTAutograd's cache, and of Inductor's cache under it."""
    counted = torch._dynamo.utils.counters
    of_both = {"misses": "miss", "bypassed": "bypass"}
    return {"hits": counted["aot_autograd"]["autograd_cache_hit"]} | {
        name: counted["aot_autograd"][f"autograd_cache_{key}"] + counted["inductor"][f"fxgraph_cache_{key}"]
        for name, key in of_both.items()
    }


def main(path: str) -> None:
    with testing.fake(2):
        model = model_of()
        step(cs.compile(model), 0)
        found = {"bytes": cs.save_cache_artifacts(model, path), "size": os.path.getsize(path), **cache_counts()}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
