"""The 74th NanoGPT speedrun record: train.py is the recipe, from configuration to loop."""
