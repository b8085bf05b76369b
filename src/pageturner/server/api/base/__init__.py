"""Code that all shapes of the API share: bodies, calls, streams and answers."""
