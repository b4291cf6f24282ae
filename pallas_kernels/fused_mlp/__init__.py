"""An activation and the product with it, of a feed-forward."""
