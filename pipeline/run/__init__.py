"""A run as a whole: its prompts, where it stands, what limits it, what it leaves behind."""
