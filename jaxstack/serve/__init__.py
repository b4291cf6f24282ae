"""Serves trained models: continuous batching over a paged KV cache, and an HTTP server compatible with OpenAI's API."""
