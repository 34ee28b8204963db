"""Devices, lanes of work beside the main one, and the collectives that run on them."""
