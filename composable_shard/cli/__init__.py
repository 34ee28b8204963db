"""The command line, ``python -m composable_shard`` or ``composable-shard``: a module for each command, and `main`."""
