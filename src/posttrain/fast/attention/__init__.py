"""Attention of our own inside a model of transformers: to pack, to share prompts, to remember."""
