"""How many tokens the small models of these tests know."""

VOCABULARY = 31
