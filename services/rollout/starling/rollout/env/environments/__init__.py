"""The built-in environments: tools, gym, agent, verifiers."""
