"""Loss of a step: credit, the objective of the algorithm, log-probabilities, distillation."""
