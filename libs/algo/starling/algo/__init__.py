"""The mathematics of the loop: advantages, staleness, packing and losses."""
