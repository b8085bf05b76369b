"""The engine as the API process sees it: its process, its streams, its deaths."""
