"""Text generation with trained models, and scoring of given text."""
