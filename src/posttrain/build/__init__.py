"""The composition root: a resolved recipe becomes parts, parts run stages, stages fill a folder."""
