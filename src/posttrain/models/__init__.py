"""Models: load and save them, score tokens, sample tokens.

====================  ==========================================================================
``models.load``       ``load_policy``: "tiny", a folder, a GGUF file or a hub id → ``Policy``
``models.save``       ``save_policy``, ``import_gguf``: an ordinary Hugging Face folder
``models.logprobs``   ``score_tokens``: log-probs and entropy of a batch, the plain way
``models.sampling``   ``filter_logits``, ``sample``: one rule for the sampler and the trainer
``models.tiny``       a model of about a million weights and its character tokenizer, from code
====================  ==========================================================================

Import from the modules themselves: only those that load or save need transformers.
"""
