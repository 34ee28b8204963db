"""Lease memory of a pool by name and size."""

import weakref


def lease(pool, nbytes, name="", owner=None):
    """Lease a slot for the request with this name and size."""
    return pool.lease(pool.request(name, nbytes), None if owner is None else weakref.ref(owner))
