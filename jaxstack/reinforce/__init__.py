"""Reinforcement learning: answers are sampled by the engine, rewarded, and trained on, all in one process."""
