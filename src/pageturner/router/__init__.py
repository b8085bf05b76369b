"""Router: one address for several servers. It passes bytes on and understands as little as it
can."""
