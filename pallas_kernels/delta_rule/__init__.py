"""The gated delta rule: a recurrence that forgets, and that corrects what its state returns for each key."""
