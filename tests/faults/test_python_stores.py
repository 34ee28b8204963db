"""Process groups whose store is implemented in Python and lacks methods that the fault watcher would use."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from composable_shard._faults.ledger import Ledger
from composable_shard._faults.watch import _Ear
from composable_shard._torch.distributed import another_client, delete_key, prefixed


class PythonStore(dist.Store):
    """A store with only the methods that torch itself needs."""

    def __init__(self):
        super().__init__()
        self.inner = dist.HashStore()

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, value):
        return self.inner.add(key, value)

    def check(self, keys):
        return self.inner.check(keys)

    def wait(self, keys, timeout=timedelta(seconds=5)):
        self.inner.wait(keys, timeout)


@pytest.fixture
def store():
    """A Python store of one rank's process group."""
    made = PythonStore()
    dist.init_process_group("gloo", store=made, rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def test_a_store_without_clone_is_used_directly_and_keeps_keys_that_it_cannot_delete():
    made = PythonStore()
    store = prefixed("a", made)
    assert another_client(store) is store
    store.set("key", "value")
    delete_key(store, "key")
    assert store.get("key") == b"value"
    assert another_client(prefixed("a", dist.HashStore())) is not store


def test_other_errors_of_a_store_are_raised():
    class Fails(PythonStore):
        def deleteKey(self, key):  # noqa: N802 - torch's name
            raise RuntimeError("the host has ended")

    made = Fails()
    with pytest.raises(RuntimeError, match="the host has ended"):
        delete_key(prefixed("a", made), "key")


def test_the_watcher_keeps_running_while_another_thread_waits_for_a_key(store):
    ledger = Ledger(dist.group.WORLD, torch.device("cpu"), lambda fault: None)
    ear = _Ear(ledger, 0.0)
    waiting = threading.Thread(target=lambda: ledger.store.get("late"), daemon=True)
    waiting.start()
    for _ in range(8):
        ear.look(ledger, "")
    ledger.store.set("late", "now")
    waiting.join(10)
    assert not waiting.is_alive()
    assert ledger.fault is None


HOSTS = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""


def test_a_connection_to_a_store_whose_host_has_died_fails_within_its_limit():
    """Torch itself retries for longer than the timeout of the store."""
    host = subprocess.Popen([sys.executable, "-c", HOSTS], stdout=subprocess.PIPE, text=True)
    try:
        port = int(host.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        assert another_client(prefixed("a", store), 20.0) is not store
    finally:
        host.kill()
        host.communicate()
    with pytest.raises(
        RuntimeError, match=r"connection to the store was not made within 1 s; .* rank 0, may have ended"
    ):
        another_client(prefixed("a", store), 1.0)
