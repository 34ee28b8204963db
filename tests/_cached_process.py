"""Compiles a sharded model under Inductor in a simulated world of two and prints what came of it; run by a test."""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import composable_shard as cs


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        cs.fully_shard(layer, reshard_after_forward=True)
    cs.fully_shard(model)
    run = torch.compile(model, fullgraph=True)
    x = torch.randn(4, 8)
    run(x).sum().backward()
    with torch.profiler.profile() as seen:
        run(x).sum().backward()
    names = [event.name for event in seen.events()]
    counters = torch._dynamo.utils.counters
    found = {
        "hits": counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"],
        "gathers": names.count("_c10d_functional::all_gather_into_tensor"),
        "reductions": names.count("_c10d_functional::reduce_scatter_tensor"),
        "gradients": sum(param.grad is not None for param in model.parameters()),
        "guarded": hasattr(torch._inductor.config.post_grad_custom_post_pass, "chained"),
    }
    sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
