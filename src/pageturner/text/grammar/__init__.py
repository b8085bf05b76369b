"""Grammars that answers match: JSON schemas, checks, and the compiler for a vocabulary."""
