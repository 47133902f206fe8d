"""Everything rollstream raises on purpose.

    RollstreamError                     exit 1
    +-- UsageError                      exit 2: the user can mend it
    |   +-- ConfigError                 a setting: names key, value and the way out
    |   +-- DataError                   a data file: names file, row and the way out
    |   +-- ModelError                  a model directory or tokenizer
    |   +-- RewardLoadError             a reward path that cannot be imported or called
    |   +-- RunConflictError            the run on the server is not the run that was asked for
    |   +-- RunStalledError             nothing is left to train; only other data, rewards or settings help
    +-- ServiceUnavailableError         exit 3: Redis or the weight channel cannot be reached
    +-- DrainTimeoutError               exit 4: work in flight did not end in time
    +-- TrainerReplacedError            exit 1: another trainer took the run over
    +-- RankLostError                   exit 1: another rank of this trainer has ended, or hangs
    +-- MessageError                    a payload that does not validate; goes to dead_letters
    +-- WeightError                     weights that fail verification; the old version goes on serving
    +-- CheckpointError                 a checkpoint cannot be written or read; older ones are untouched
    |   +-- DiskFullError               there is no space left for it
    +-- ScoringError                    a teacher or judge could not deal with one group
    |   +-- ServerAwayError           nobody is where its server should be; its group goes to others
    +-- EngineError                     a generation engine failed on one group
    |   +-- NonFiniteError              its weights gave logits that are not finite
    +-- EngineLostError                 a generation engine has ended; its worker ends, its groups go to others

To add one: derive it from the closest class here, give it the message in full sentences (what is
wrong, the value, the way out), and add it to the tree above.
"""

from __future__ import annotations

from collections.abc import Collection


class RollstreamError(Exception):
    """Base of everything raised on purpose. `exit_code` is what a process ends with."""

    exit_code = 1


class UsageError(RollstreamError):
    """The user can mend this; the message says how."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, of the wrong type or impossible."""


class DataError(UsageError):
    """A data file is missing, broken or lacks a column."""


class ModelError(UsageError):
    """A model directory has no weights, no tokenizer or an architecture that cannot be used."""


class RewardLoadError(UsageError):
    """A reward function cannot be found or has the wrong shape."""


class RunConflictError(UsageError):
    """The run on the server differs from the one asked for."""


class ServiceUnavailableError(RollstreamError):
    """A service that is needed cannot be reached."""

    exit_code = 3


class DrainTimeoutError(RollstreamError):
    """Work in flight did not end before the drain time-out."""

    exit_code = 4


class RunStalledError(UsageError):
    """Nothing is left to train on, and trying again would not help; the message says why."""


class TrainerReplacedError(RollstreamError):
    """Another trainer took the run over. Nothing that this one has may be written any more."""


class RankLostError(RollstreamError):
    """Another of a trainer's ranks has ended, or does not answer. None can go on without it."""


class MessageError(RollstreamError):
    """A payload does not validate. Its group goes to dead_letters with this message."""


class WeightError(RollstreamError):
    """Weights are not what their manifest says, or do not fit the model."""


class CheckpointError(RollstreamError):
    """A checkpoint cannot be written or read. The run may go on without it."""


class DiskFullError(CheckpointError):
    """There is no space left for a checkpoint."""


class EngineError(RollstreamError):
    """A generation engine could not complete a group."""


class NonFiniteError(EngineError):
    """Weights gave a group logits that are not finite."""


class EngineLostError(RollstreamError):
    """A generation engine has ended. Nothing is wrong with the groups that it had."""


class ScoringError(RollstreamError):
    """A teacher or a judge could not deal with a group, or with a completion."""


class ServerAwayError(ScoringError):
    """The server of a teacher or a judge cannot be reached. Nothing is wrong with the groups that it was to have."""


def few(names: Collection[str]) -> str:
    """Up to three of the names, in order, for a message."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if shown else "none"
