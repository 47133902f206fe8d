"""Where a run goes on: what its directory says before a server is asked or a model loaded.

In: settings, and the checkpoints and the identity of the run in its directory. Out: the checkpoint to
go on from, or why nothing is left to do. It changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.agreement import differences
from pipeline.checkpoints import Checkpoint, Checkpoints
from pipeline.config import Config
from pipeline.errors import CheckpointError, ConfigError, RunConflictError
from pipeline.prompts import PromptOrder
from pipeline.run.data import training_set
from pipeline.run.record import read_identity
from pipeline.settings.files import fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a run is over, and how it goes on all the same."""

    reason: str
    to_go_on: str


def run_checkpoints(config: Config) -> Checkpoints:
    """The run's own."""
    return Checkpoints(config.run_dir / "checkpoints", config.checkpoint)


def checkpoint_to_go_on_from(config: Config) -> Checkpoint | None:
    """As `checkpoint.resume` says; None begins with the initial weights.

    Raises ConfigError where there is none in the directory that it names, or where a newer one is damaged: to go on
    from an older one silently would lose what it holds. Raises RunConflictError for one
    that was written with other settings: the run may have been reset in Redis and started anew.
    """
    found = _chosen(config)
    if found is None:
        return None
    ours = fingerprint(config)
    # One that an older version wrote says nothing of settings that came later: they are as if they were not there.
    theirs = {**fingerprint(Config()), **found.state.get("settings", ours)}
    if differing := differences(ours, theirs, "there"):
        raise RunConflictError(
            f"{found.path} was written with other settings: {differing}. Make them equal, choose another run.name "
            "(`rollstream checkpoints export` writes a model to begin it with: model.path), "
            f"{_other_beginning(config, found)}"
        )
    return found


def _chosen(config: Config) -> Checkpoint | None:
    own, wanted = run_checkpoints(config), config.checkpoint.resume
    if wanted == "never":
        return None
    if damaged := own.damaged():
        before = own.latest()
        raise ConfigError(
            f"{damaged[0]} is no complete checkpoint: a file of it is missing, cannot be read or has not the size that "
            f"was written. Bring it back, or move it away to go on from {before.path if before else 'the beginning'}; "
            "groups that only it holds are in no weights then"
        )
    if (latest := own.latest()) is not None or wanted == "auto":
        return latest
    try:
        return own.find(wanted)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume = {wanted!r}: {error}") from error


def _other_beginning(config: Config, refused: Checkpoint) -> str:
    if not is_own(config, refused):
        return 'or take another checkpoint with checkpoint.resume ("never" begins with the initial weights)'
    return (
        f"begin anew with `rollstream reset --run {config.run.name} --with-records`, which moves {config.run_dir} "
        'aside, or set checkpoint.resume = "never"'
    )


def is_own(config: Config, checkpoint: Checkpoint) -> bool:
    """Whether the run has written it itself."""
    return Path(checkpoint.path).parent == run_checkpoints(config).directory


def already_over(config: Config, checkpoint: Checkpoint | None) -> Ending | None:
    """Why nothing is left to do; None where there is, also if that is only the end of a run that was cut off.

    checkpoint: what `checkpoint_to_go_on_from` found. Raises ConfigError or DataError for data that cannot be read.
    """
    if checkpoint is None or not is_own(config, checkpoint) or read_identity(config.run_dir).get("ended") is None:
        return None
    if 0 < config.trainer.max_steps <= checkpoint.step:
        return Ending(
            reason=f"all {checkpoint.step} steps are done",
            to_go_on="raise trainer.max_steps to go on, or choose another run.name",
        )
    if config.data.epochs == 0:
        return None
    order = PromptOrder(len(training_set(config)), seed=config.run.seed, epochs=config.data.epochs)
    if order.at(int(checkpoint.state["cursor"])) is not None:
        return None
    return Ending(
        reason="the data has ended",
        to_go_on="add rows to data.path to go on, or choose another run.name",
    )
