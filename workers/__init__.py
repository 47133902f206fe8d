"""One module for each kind of process: build the parts, run the loop, nothing else."""
