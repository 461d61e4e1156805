"""Beyond one process: proxies that satisfy the protocols of learner and engine.

Nothing here is imported before a recipe asks for it, and Ray not before its address is used.
"""
