"""A typical user script: a training loop for a model of Transformers with activation checkpointing and FSDP2.

torchrun --nproc-per-node 2 _script_loop.py STEPS
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

SEQUENCE, VOCABULARY = 64, 128


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQUENCE}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    model.gradient_checkpointing_enable()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = int(sys.argv[1])
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, steps)
    data = TensorDataset(torch.randint(0, VOCABULARY, (512, SEQUENCE)))
    loader = DataLoader(
        data, batch_size=16, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True, timeout=60
    )
    for step, (tokens,) in enumerate(loader, 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        if torch.isnan(loss):
            raise RuntimeError(f"step {step}: the loss is not a number")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}, norm {norm:.3f}, rate {schedule.get_last_lr()[0]:.1e}")
        if step == steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
