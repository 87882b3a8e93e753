"""Settings of the policy, one section per file; `policy` contains all of them."""
