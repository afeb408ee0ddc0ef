"""The errors a user can meet. Each message reads: field or object, value got, rule, then `hint:`."""

from __future__ import annotations


class UniRLError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(UniRLError, ValueError):
    """The run configuration is wrong; raised before any process group exists."""


class MeshError(ConfigError):
    """The parallel layout does not fit the model, the batch or the world size."""


class PlanError(UniRLError, ValueError):
    """A topology file or a collective plan is malformed, contradictory or infeasible."""


class ShapeError(UniRLError, ValueError):
    """An op was given a shape or dtype it does not take."""


class InvarianceError(UniRLError, RuntimeError):
    """The platform cannot hold the promise of `invariance.mode`; names the op."""


class CommError(UniRLError, RuntimeError):
    """A collective failed or a rank disappeared."""


class DeviceMemoryError(UniRLError, MemoryError):
    """Memory ran out; names the phase, the largest tensors and what to lower."""


class CheckpointError(UniRLError, RuntimeError):
    """A checkpoint is missing, damaged or does not belong to this run."""


class MembershipChanged(UniRLError, RuntimeError):  # noqa: N818 - an event, not an error
    """The set of live ranks changed; the loop must be entered again on a new mesh."""


class ElasticError(UniRLError, RuntimeError):
    """The job cannot go on with the ranks that are left, or not with this one; says what was lost."""


class StopRequested(UniRLError, RuntimeError):  # noqa: N818 - an event, not an error
    """The scheduler asked this process to end; its training thread is on the way out."""


class Stopped(UniRLError, RuntimeError):  # noqa: N818 - an event, not an error
    """The run ended before its last step because a signal asked for it; says what was saved.

    Attributes:
        signum: the signal.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


class CorruptionError(UniRLError, RuntimeError):
    """Ranks hold different bytes of what must be equal on all of them.

    Attributes:
        ranks: those that are known to be wrong; empty when nobody can tell.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks
