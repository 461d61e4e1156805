"""Sync: how new weights reach an engine."""
