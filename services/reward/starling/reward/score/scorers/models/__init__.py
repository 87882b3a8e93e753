"""Reward models of others as scorers, one file each; `reward_models.py` says what each needs."""
