"""OpenTelemetry traces of groups, from the prompt to the weights that they changed."""
