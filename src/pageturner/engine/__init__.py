"""Runtime: from a plan to tokens. The engine and its process, packing, sampling, grammars,
drafts."""
