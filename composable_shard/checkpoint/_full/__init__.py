"""Full tensors: taken out of sharded models and optimizers, and put into them."""
