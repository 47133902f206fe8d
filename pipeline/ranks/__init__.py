"""One trainer on several processes, each with a device: its ranks.

In: what torchrun says in the environment. Out: rank 0, which is the trainer that the run knows, and
others that compute what it tells them to. Alone, a trainer goes through none of this.

    rank 0   streams, Redis, weights, checkpoints    tells: step, export, save, load, stop
    others   wait to be told ------------------------> the same step on their micro-batches
"""
