"""The exception tree.

    ComposableShardError
    ├── ShardConfigError            a setting, a module or a parameter that cannot be sharded as asked
    │   ├── ShardConfigValueError   ... of a right type and a wrong value  (also a ValueError)
    │   ├── ShardConfigTypeError    ... of a wrong type                    (also a TypeError)
    │   └── ShardConfigStateError   ... found out at the first forward     (also a RuntimeError)
    ├── RankMismatchError           ranks have different plans                               (also a RuntimeError)
    ├── StaleStateError             weights were changed between forward and backward        (also a RuntimeError)
    ├── SavedTensorModifiedError    a saved activation was written in place before backward (also a RuntimeError)
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
    """A model that turns out, at its first forward, not to be ready to run."""


class RankMismatchError(ComposableShardError, RuntimeError):
    """Ranks that must work together have different plans: other groups, sizes, order or settings."""


class StaleStateError(ComposableShardError, RuntimeError):
    """Backward needs weights of a forward that an optimizer has stepped since."""


class SavedTensorModifiedError(ComposableShardError, RuntimeError):
    """An activation that backward needs was modified in place after it had been saved."""


class PhaseError(ComposableShardError, AssertionError):
    """A parameter group was asked for a transition that its phase table does not allow; please report it."""


class CompiledGraphWarning(UserWarning):
    """`torch.compile` has broken a sharded model's graph, or keeps gathered weights that it should gather again.

    Results are right all the same; memory or speed is not what was promised.
    """
