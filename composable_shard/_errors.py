"""The exception tree.

    ComposableShardError
    ├── ShardConfigError            a setting, a module or a parameter that cannot be sharded as asked
    │   ├── ShardConfigValueError   ... of a right type and a wrong value  (also a ValueError)
    │   ├── ShardConfigTypeError    ... of a wrong type                    (also a TypeError)
    │   ├── ShardConfigStateError   ... found out at the first forward     (also a RuntimeError)
    │   ├── ShardConfigAttributeError ... of a view that can only be read    (also an AttributeError)
    │   ├── MixedShardingError      modules of torch's FSDP2 and of ours inside of each other     (also a ValueError)
    │   ├── PoolBudgetError         a budget of memory that a group does not fit into    (also a ValueError)
    │   ├── ArtifactMismatchError   compiled code in a file that was made for something else (also a ValueError)
    │   └── ...                     kinds of these that are also what torch's FSDP2 raises for the same mistake
    ├── RankMismatchError           ranks have different plans, or do different things       (also a RuntimeError)
    ├── PeerLostError               another rank has ended, failed, or cannot be reached      (also a RuntimeError)
    ├── StaleStateError             weights were changed where or when the change is lost     (also a RuntimeError)
    ├── SavedTensorModifiedError    what backward reads was written in place before it       (also a RuntimeError)
    ├── OffloadError                state on disk that could not be written or read          (also a RuntimeError)
    ├── CheckpointError             a checkpoint that could not be written or read           (also a RuntimeError)
    │   ├── CheckpointCorruptError  ... for its files are not as they were written
    │   ├── CheckpointMismatchError ... for it holds something else than what is asked for   (also a ValueError)
    │   ├── CheckpointUnsafeError   ... for it names what a checkpoint must not name, or asks to run code
    │   └── CheckpointIncompleteError ... for there is none, or its saving has not ended     (also a FileNotFoundError)
    ├── WorldError                  ranks of a test that cannot go on together               (also a RuntimeError)
    │   ├── CollectiveMismatchError ... for they have issued different collectives
    │   ├── DeadlockError           ... for each waits for another one
    │   ├── RankFailedError         ... for one of them, a process of its own, has failed
    │   └── WorldTimeoutError       ... within the time they were given    (also a TimeoutError)
    ├── RaceError                   accesses to the same memory that no event orders        (also an AssertionError)
    └── PhaseError                  an illegal transition: a fault of this library (also an AssertionError)

    CompiledGraphWarning            (a UserWarning) a compiled graph that is right, but not what was promised

Every message says what is wrong, where (the argument or the parameter's fully qualified name, FQN), and what to do.
"""


class ComposableShardError(Exception):
    """Base of every error that this library raises on purpose."""


class ShardConfigError(ComposableShardError):
    """A setting, a module or a parameter that cannot be sharded as asked."""


class ShardConfigValueError(ShardConfigError, ValueError):
    """A setting of the right type whose value cannot work."""


class ShardConfigTypeError(ShardConfigError, TypeError):
    """A setting of the wrong type."""


class ShardConfigStateError(ShardConfigError, RuntimeError):
    """A call at the wrong time, or a model that turns out, at its first forward, not to be ready to run."""


class ShardConfigAttributeError(ShardConfigError, AttributeError):
    """An attribute that a module's state does not have, or that cannot be set there."""


class MixedShardingError(ShardConfigValueError):
    """A module that torch's FSDP2 has sharded lies inside of one that this library has sharded, or around it."""


# Kinds of their own where torch's FSDP2 raises another one for the same mistake, so that code that catches that works.


class ShardConfigAssertionError(ShardConfigValueError, AssertionError):
    """A value for which torch's FSDP2 raises an AssertionError."""


class ShardConfigUnsupportedError(ShardConfigValueError, NotImplementedError):
    """A value for which torch's FSDP2 raises a NotImplementedError."""


class ShardConfigTypeValueError(ShardConfigTypeError, ShardConfigValueError):
    """A setting of the wrong type for which torch's FSDP2 raises a ValueError."""


class ShardConfigTypeAssertionError(ShardConfigTypeError, AssertionError):
    """A definition of the wrong type for which torch's FSDP2 raises an AssertionError."""


class ShardConfigStateAssertionError(ShardConfigStateError, AssertionError):
    """A call at the wrong time for which torch's FSDP2 raises an AssertionError."""


class RankMismatchError(ComposableShardError, RuntimeError):
    """Ranks that must work together have different plans, or do different things: it is raised on all of them."""


class PeerLostError(ComposableShardError, RuntimeError):
    """Another rank has failed alone, has ended, or cannot be reached: it is raised on all ranks that are left."""


class PoolBudgetError(ShardConfigValueError):
    """A budget of memory that is too small for a group; found when the plan is made, before anything runs.

    Attributes:
        fqn: of the group that needs most.
        least: the least budget that works, in bytes.
    """

    def __init__(self, message: str, fqn: str, least: int) -> None:
        super().__init__(message)
        self.fqn = fqn
        self.least = least


class StaleStateError(ComposableShardError, RuntimeError):
    """Weights were changed where the change is lost, or where it comes too early.

    Unsharded weights were edited in place, or backward needs weights that an optimizer, a load or a write by hand has
    changed since their forward.
    """


class SavedTensorModifiedError(ComposableShardError, RuntimeError):
    """Something that backward reads was modified in place: a saved activation, or the unsharded copy of a weight."""


class OffloadError(ComposableShardError, RuntimeError):
    """State on disk could not be written or read, or was lost so; the optimizer does not step again.

    Weights may be changed in part: make model and optimizer anew, and load a checkpoint.
    """


class ArtifactMismatchError(ShardConfigValueError):
    """Compiled code in a file does not fit to this model on this rank; compile anew.

    Attributes:
        differences: what is not as it was where the file was written, a statement each.
    """

    def __init__(self, path: str, differences: tuple[str, ...]) -> None:
        super().__init__(f"path: {path} holds code that was compiled for something else. {'; '.join(differences)}")
        self.differences = differences


class CheckpointError(ComposableShardError, RuntimeError):
    """A checkpoint could not be written or read; on all ranks.

    What was to be loaded has not changed, unless the message says that it was filled in part: files that fail to be
    read after they were checked are the one case.
    """


class CheckpointCorruptError(CheckpointError):
    """Files of a checkpoint are missing, have other sizes or other bytes than were written, or cannot be understood."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint holds other names, shapes, dtypes or numbers of ranks than what it is loaded into."""


class CheckpointUnsafeError(CheckpointError):
    """A checkpoint names files outside of its directory, links, or objects that only running code could make."""


class CheckpointIncompleteError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or one whose saving has not ended."""


class WorldError(ComposableShardError, RuntimeError):
    """Ranks of a test cannot go on together; see `composable_shard.testing`."""


class CollectiveMismatchError(WorldError):
    """Ranks have issued different collectives at one point of a group, or some of them none."""


class DeadlockError(WorldError):
    """No rank can go on, for each waits for another one."""


class RankFailedError(WorldError):
    """A rank that is a process of its own has failed; the message begins with its traceback."""


class WorldTimeoutError(WorldError, TimeoutError):
    """The ranks of a test have not ended in the time that they were given."""


class RaceError(ComposableShardError, AssertionError):
    """Streams of a program access the same memory, and no event says which of them comes first."""


class PhaseError(ComposableShardError, AssertionError):
    """A parameter group was asked for a transition that its phase table does not allow; please report it."""


class CompiledGraphWarning(UserWarning):
    """`torch.compile` has broken a sharded model's graph, or keeps gathered weights that it should gather again.

    Results are right all the same; memory or speed is not what was promised.
    """
