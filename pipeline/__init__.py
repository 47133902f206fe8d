"""rollstream: asynchronous reinforcement learning for language models over queues.

The library. It knows streams, messages, weights and learning; it knows nothing of processes,
which live in `workers`.
"""

__version__ = "0.1.0"
