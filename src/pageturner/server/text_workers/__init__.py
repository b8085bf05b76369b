"""Text workers: tokenising and templates in processes of their own."""
