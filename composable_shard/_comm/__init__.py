"""Devices, the lanes (streams) that run asynchronous work, and the collectives that run on them."""
