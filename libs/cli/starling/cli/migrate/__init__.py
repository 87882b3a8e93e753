"""`starling migrate`: a recipe from a settings file of Cosmos-RL, with what could not be translated."""
