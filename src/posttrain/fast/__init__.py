"""The same numbers in less time: packing, shared prompts, CUDA graphs, kernels, slots.

Two doors, each with a plain twin that gives the same numbers: without this package only speed is
lost. Nobody outside imports more of it than the doors.

===============  =================================  ==========================================
``fast.score``   ``score_tokens``: log-probs        plain: ``models.logprobs.score_tokens``
``fast.decode``  ``Decoder``: sampling in slots     plain: ``rollout.engines.native``
===============  =================================  ==========================================
"""
