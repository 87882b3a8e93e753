"""Search of all settings, and the recipe with every default."""
