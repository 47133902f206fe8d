"""One machine's part of a run: its server, its worker processes, and what they say."""
