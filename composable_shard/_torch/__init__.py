"""Shims for every private name of torch that this library uses. No other module uses private names of torch."""
