"""Users of the Redis server."""
