"""A sharded decoder and its optimizer, and an unsharded decoder that gets the data of all ranks."""

from __future__ import annotations

import torch

from _blocks import Transformer, next_token_loss, token_batch
from composable_shard import fully_shard


class Training:
    """A sharded decoder with its optimizer, and an unsharded one that gets the data of all ranks."""

    def __init__(self, rank, world, layers=3):
        self.rank, self.world, self.at = rank, world, 0
        torch.manual_seed(0)
        self.plain, self.model = Transformer(layers=layers), Transformer(layers=layers)
        self.model.load_state_dict(self.plain.state_dict())
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.sides = [(side, torch.optim.AdamW(side.parameters())) for side in (self.model, self.plain)]
        self.optimizer = self.sides[0][1]

    def backward(self):
        next_token_loss(self.model, *token_batch(self.rank, self.at)).backward()

    def forward(self):
        return self.model(*token_batch(self.rank, self.at))

    def backward_of_plain(self):
        for rank in range(self.world):
            (next_token_loss(self.plain, *token_batch(rank, self.at)) / self.world).backward()

    def update(self):
        """Run the optimizer steps of both decoders."""
        for _, optimizer in self.sides:
            optimizer.step()
            optimizer.zero_grad()
        self.at += 1

    def step(self):
        self.backward()
        self.backward_of_plain()
        self.update()

    def check(self):
        for (name, ours), theirs in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, msg=lambda text, name=name: f"{name}: {text}")

    def check_gradients(self):
        for (name, ours), theirs in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(
                ours.grad.full_tensor(), theirs.grad, msg=lambda text, name=name: f"gradient of {name}: {text}"
            )

    def goes_on_exactly(self):
        """Compare gradients, two steps, and an evaluation between them with the unsharded decoder."""
        for _ in range(2):
            self.backward()
            self.backward_of_plain()
            self.check_gradients()
            self.update()
            with torch.no_grad():
                tokens = token_batch(self.rank, 1000 + self.at)
                torch.testing.assert_close(self.model(*tokens), self.plain(*tokens))
        self.check()
