"""OpenAI's Responses API and the store of its answers."""
