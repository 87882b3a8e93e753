"""The scorer `judge`: a language model behind an OpenAI-compatible API that judges completions by a rubric."""
