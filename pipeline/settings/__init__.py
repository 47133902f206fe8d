"""From what is written in files, variables and flags to one `Config`, and back."""
