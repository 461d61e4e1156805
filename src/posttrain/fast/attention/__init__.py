"""Attention of our own inside a model of transformers: to pack, share prompts, and keep slots."""
