"""What the policy decides: which work fits its version."""
