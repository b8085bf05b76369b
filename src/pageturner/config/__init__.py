"""Config: every setting with its name, default and explanation, and how flags and files become
settings."""
