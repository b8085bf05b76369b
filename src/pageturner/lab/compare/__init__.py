"""Comparisons of policies and runs, and the reports that show them."""
