"""Pipelines: the reinforcement-learning loop, supervised training, evaluation. No backend here."""
