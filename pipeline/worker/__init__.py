"""What every worker process is made of, whatever its role."""
