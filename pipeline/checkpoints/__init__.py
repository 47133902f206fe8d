"""Checkpoints on disk: the policy, the optimiser and where the run stands, all or nothing.

In: a learner and the run's state. Out: `step_000050/` with

    model/         as the learner saves it: a directory that other programs load
    optimizer.pt   the learner's state_dict, tensors and plain values only; learner.json where it has no tensors
    state.json     the run's state: cursor, version, group ids that it commits, settings
    COMPLETE       written last: sequence number, trainer's number, time, size and hash of every file

A directory is written aside, forced to disk and renamed, so that a crash at any moment leaves the
older checkpoints and no half one. Nothing in a checkpoint can run code when it is loaded.
"""

from pipeline.checkpoints.found import Checkpoint, Restorable, Savable
from pipeline.checkpoints.store import Checkpoints

__all__ = ["Checkpoint", "Checkpoints", "Restorable", "Savable"]
