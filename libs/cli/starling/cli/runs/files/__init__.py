"""Files of a run, read in bounded memory: lines of metrics, curves, tables of events, settings and state."""
