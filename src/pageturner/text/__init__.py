"""Text: everything between strings and tokens that servers and the offline API share. No HTTP, no
kernels."""
