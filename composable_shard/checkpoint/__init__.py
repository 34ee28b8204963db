"""The state of training, taken out of sharded models and put back: full tensors, and checkpoints."""
