"""OpenAI's API: completions, chats, embeddings, and reranking beside them."""
