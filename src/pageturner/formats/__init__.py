"""Files: model references, containers and the tokenizers inside them. No kernels, so the API
process may import it.
"""
