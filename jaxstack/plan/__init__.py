"""Planning of layouts: the rules of what fits, the choice, and plans for clusters that are not present."""
