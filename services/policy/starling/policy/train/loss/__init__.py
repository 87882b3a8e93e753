"""Loss."""
