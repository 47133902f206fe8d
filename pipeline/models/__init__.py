"""The policy as a model of transformers: its files, its weights as host tensors, its routers."""
