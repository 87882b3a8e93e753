"""Losses in torch: one short pure function per file, each naming its paper and its metrics."""
