"""Text generation and scoring with trained models."""
