"""HTTP front end of the reward service: rewards for any trainer."""
