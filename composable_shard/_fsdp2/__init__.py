"""Torch's private FSDP2 state of our sharded modules, for code that reads, calls or writes it.

Torch finds a `LazyState` for each sharded module. The first access to one of its attributes loads the facades:
`state.py` (`FSDPState`), `group.py` (`FSDPParamGroup`) and `param.py` (`FSDPParam`). A facade stores no state: it
computes each attribute from ours when it is read. `table.py` lists the names, who uses them, and what they do here. The
core does not depend on this package.
"""
