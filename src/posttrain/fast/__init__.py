"""The same numbers in less time: packing, shared prompts, CUDA graphs, kernels, slots.

Two doors. Everything behind them has a plain twin that computes the same; no result depends on
this package. Nobody outside imports more of it than the doors.

===============  =================================  ==========================================
``fast.score``   ``score_tokens``: log-probs        plain: ``models.logprobs.score_tokens``
``fast.decode``  ``Decoder``: sampling in slots     plain: ``rollout.engines.native``
===============  =================================  ==========================================
"""
