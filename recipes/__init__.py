"""Training scripts on the library: `python -m recipes.NAME.train` for speedrun, grpo and lens."""
