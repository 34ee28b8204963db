"""Gather full tensors from sharded models and optimizers, and load them back."""
