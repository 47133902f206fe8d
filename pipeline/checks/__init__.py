"""Whether what the settings name and what a machine needs is there, before anything starts."""
