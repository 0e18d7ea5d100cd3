"""The engine behind the public functions: the tile loop, the LM head's products, the running softmax."""
