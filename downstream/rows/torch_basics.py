"""torch itself: what every training script uses around a sharded model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from _rows import Rows, Run

rows = Rows("torch", environment="torch", versions=("torch",))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 5))


@rows("swa_utils.AveragedModel over sharded weights")
def averaged(run: Run) -> None:
    dist.init_process_group("gloo")
    net = model()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    average = torch.optim.swa_utils.AveragedModel(net)
    run.sharded(net)
    for step in range(3):
        torch.manual_seed(10 * step + run.rank)
        net(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
    run.weights(net)
    run.weights(average, "averaged")
