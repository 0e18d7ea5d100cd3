"""The machinery behind the doors: the tile loop, the LM head's products, the running softmax."""
