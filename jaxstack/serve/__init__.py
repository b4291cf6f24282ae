"""Serving of trained models: continuous batching over a paged KV cache, and an HTTP server with OpenAI's routes."""
