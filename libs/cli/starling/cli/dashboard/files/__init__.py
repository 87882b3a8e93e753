"""What the dashboard reads of the files of a run: each line once, in bounded memory."""
