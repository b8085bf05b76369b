"""Executor: from a plan to tokens. Packing, sampling, processors, grammars, drafts, adapters."""
