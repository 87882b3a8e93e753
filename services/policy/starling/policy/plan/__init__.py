"""Planning of a policy's mesh without a GPU: memory and traffic of its ranks. Pure, without torch."""
