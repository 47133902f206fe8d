"""Weights from a publisher to its subscribers, over real ZeroMQ."""
