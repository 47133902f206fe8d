"""A run on Hugging Face Jobs."""
