"""The exception tree.

    ComposableShardError
    ├── ShardConfigError            an invalid setting, or a module or parameter that cannot be sharded as requested
    │   ├── ShardConfigValueError   ... of the right type with a wrong value    (also a ValueError)
    │   ├── ShardConfigTypeError    ... of a wrong type                         (also a TypeError)
    │   ├── ShardConfigStateError   ... at the wrong time, or found at the first forward      (also a RuntimeError)
    │   ├── ShardConfigAttributeError ... a missing or read-only attribute of a module's state (also an AttributeError)
    │   ├── MixedShardingError      a mix of modules of torch's FSDP2 and of this library     (also a ValueError)
    │   ├── PoolBudgetError         a memory budget that is too small for a group             (also a ValueError)
    │   ├── ArtifactMismatchError   compiled code in a file does not fit this model or rank   (also a ValueError)
    │   ├── LayoutMismatchError     layouts of senders and receivers do not match             (also a ValueError)
    │   └── ...                     variants that are also the type that torch's FSDP2 raises for the same mistake
    ├── RankMismatchError           ranks have different plans, or do different things        (also a RuntimeError)
    ├── PeerLostError               another rank has ended, failed, or cannot be reached      (also a RuntimeError)
    ├── StaleStateError             a change of weights would be lost, or came too early      (also a RuntimeError)
    ├── SavedTensorModifiedError    a tensor that backward reads was modified in place        (also a RuntimeError)
    ├── OffloadError                state on disk could not be written or read                (also a RuntimeError)
    ├── CheckpointError             a checkpoint could not be written or read                 (also a RuntimeError)
    │   ├── CheckpointCorruptError  ... because its files differ from what was written
    │   ├── CheckpointMismatchError ... because it does not fit the model or optimizer        (also a ValueError)
    │   ├── CheckpointUnsafeError   ... because it names files or objects that are not allowed, or asks to run code
    │   └── CheckpointIncompleteError ... because there is none, or its save did not finish   (also a FileNotFoundError)
    ├── WorldError                  the ranks of a test cannot continue together              (also a RuntimeError)
    │   ├── CollectiveMismatchError ... because they have issued different collectives
    │   ├── DeadlockError           ... because each one waits for another one
    │   ├── RankFailedError         ... because one of them, a separate process, has failed
    │   └── WorldTimeoutError       ... within their time limit                               (also a TimeoutError)
    ├── RaceError                   unordered accesses of several streams to the same memory  (also an AssertionError)
    └── PhaseError                  an illegal transition: a bug in this library              (also an AssertionError)

    CompiledGraphWarning            (a UserWarning) a compiled graph is correct, but uses more memory or time

Every message states what is wrong, where (the argument, or the parameter's fully qualified name, FQN), and what to do.
"""

__all__ = [
    "ArtifactMismatchError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointIncompleteError",
    "CheckpointMismatchError",
    "CheckpointUnsafeError",
    "CollectiveMismatchError",
    "CompiledGraphWarning",
    "ComposableShardError",
    "DeadlockError",
    "LayoutMismatchError",
    "MixedShardingError",
    "OffloadError",
    "PeerLostError",
    "PhaseError",
    "PoolBudgetError",
    "RaceError",
    "RankFailedError",
    "RankMismatchError",
    "SavedTensorModifiedError",
    "ShardConfigAttributeError",
    "ShardConfigError",
    "ShardConfigStateError",
    "ShardConfigTypeError",
    "ShardConfigValueError",
    "StaleStateError",
    "WorldError",
    "WorldTimeoutError",
]


class ComposableShardError(Exception):
    """Base of every error that this library raises on purpose."""


class ShardConfigError(ComposableShardError):
    """A setting is invalid, or a module or parameter cannot be sharded as requested."""


class ShardConfigValueError(ShardConfigError, ValueError):
    """A setting of the right type whose value cannot work."""


class ShardConfigTypeError(ShardConfigError, TypeError):
    """A setting of the wrong type."""


class ShardConfigStateError(ShardConfigError, RuntimeError):
    """A call at the wrong time, or a model that is not ready to run."""


class ShardConfigAttributeError(ShardConfigError, AttributeError):
    """An attribute does not exist on a module's state, or cannot be set there."""


class MixedShardingError(ShardConfigValueError):
    """A module sharded by torch's FSDP2 contains a module sharded by this library, or the other way round."""


# Variants that are also the type that torch's FSDP2 raises for the same mistake, so that code which catches it works.


class ShardConfigAssertionError(ShardConfigValueError, AssertionError):
    """A value for which torch's FSDP2 raises an AssertionError."""


class ShardConfigUnsupportedError(ShardConfigValueError, NotImplementedError):
    """A value for which torch's FSDP2 raises a NotImplementedError."""


class ShardConfigTypeValueError(ShardConfigTypeError, ShardConfigValueError):
    """A setting of the wrong type for which torch's FSDP2 raises a ValueError."""


class ShardConfigTypeAssertionError(ShardConfigTypeError, AssertionError):
    """Invalid methods of a tensor subclass (``fsdp_pre_all_gather``): torch's FSDP2 raises an AssertionError."""


class ShardConfigStateAssertionError(ShardConfigStateError, AssertionError):
    """A call at the wrong time for which torch's FSDP2 raises an AssertionError."""


class RankMismatchError(ComposableShardError, RuntimeError):
    """Ranks that must work together have different plans, or do different things. Raised on all of these ranks."""


class PeerLostError(ComposableShardError, RuntimeError):
    """Another rank has failed, has ended, or cannot be reached. Raised on all remaining ranks."""


class PoolBudgetError(ShardConfigValueError):
    """A memory budget is too small for a group, or `DiskOffloadPolicy.memory` for the state of a parameter.

    For a group it is raised when a schedule is made: before the first forward, or when the order of modules is known.

    Attributes:
        fqn: FQN of the group, or of the parameter.
        least: the smallest budget that works, in bytes.
    """

    def __init__(self, message: str, fqn: str, least: int) -> None:
        super().__init__(message)
        self.fqn = fqn
        self.least = least


class StaleStateError(ComposableShardError, RuntimeError):
    """Parameters were changed where the change would be lost, or before backward was done with the old values.

    Either unsharded parameters were modified in place, or backward needs parameters that an optimizer, a load or other
    code has changed since their forward. `weights.send` and `receive` raise it if tensors no longer match the plan.
    """


class SavedTensorModifiedError(ComposableShardError, RuntimeError):
    """A tensor that backward reads was modified in place: a saved activation, or the unsharded copy of a weight."""


class OffloadError(ComposableShardError, RuntimeError):
    """Optimizer state on disk could not be written or read, or is lost. The optimizer cannot step again.

    Some weights may have been updated already. Re-create the model and the optimizer, and load a checkpoint.
    """


class ArtifactMismatchError(ShardConfigValueError):
    """The compiled code in a file does not fit this model on this rank; compile the model again.

    Attributes:
        differences: one statement per difference between this process and the one that wrote the file.
    """

    def __init__(self, path: str, differences: tuple[str, ...]) -> None:
        super().__init__(
            f"path: the compiled code in {path} does not fit this model on this rank. {'; '.join(differences)}"
        )
        self.differences = differences


class LayoutMismatchError(ShardConfigValueError):
    """Weights cannot be sent, because the layouts of senders and receivers do not match.

    Attributes:
        problems: one statement per mismatch.
    """

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n    ".join(["the layouts of senders and receivers do not match:", *problems]))
        self.problems = problems

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return LayoutMismatchError, (self.problems,)


class CheckpointError(ComposableShardError, RuntimeError):
    """A checkpoint could not be written or read. Raised on all ranks.

    After a failed load, the model and optimizer are unchanged, with one exception: if reading a file fails after the
    checks have passed, they may be partially loaded, and the message reports that.
    """


class CheckpointCorruptError(CheckpointError):
    """Files of a checkpoint are missing, cannot be parsed, or differ in size or content from what was written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The names, shapes, dtypes or number of ranks of a checkpoint do not fit the objects it is loaded into."""


class CheckpointUnsafeError(CheckpointError):
    """A checkpoint names files outside of its directory, links, or objects whose loading would run code."""


class CheckpointIncompleteError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or its save did not finish."""


class WorldError(ComposableShardError, RuntimeError):
    """The ranks of a test cannot continue together; see `composable_shard.testing`."""


class CollectiveMismatchError(WorldError):
    """The ranks of a process group have issued different collectives, or some ranks have issued none."""


class DeadlockError(WorldError):
    """No rank can continue, because each one waits for another one."""


class RankFailedError(WorldError):
    """A rank that runs in a separate process has failed; the message begins with its traceback."""


class WorldTimeoutError(WorldError, TimeoutError):
    """The ranks of a test have not finished within their time limit."""


class RaceError(ComposableShardError, AssertionError):
    """Several streams access the same memory, and no event orders these accesses."""


class PhaseError(ComposableShardError, AssertionError):
    """A parameter group was asked for a transition that its phase table does not allow. Please report this bug."""


class CompiledGraphWarning(UserWarning):
    """A graph of a sharded model breaks, saves parameters that it should gather again, or exposes communication.

    Results are correct, but the step takes more memory or time than it should.
    """
