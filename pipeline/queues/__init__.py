"""What `streams` is made of: the connection to Redis, leases, the ledger and what can be seen of them."""
