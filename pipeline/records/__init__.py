"""What stays of a run on disk: the row of each step, samples, the learning curve, trackers."""
