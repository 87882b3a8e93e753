"""Tensor parallelism with sequence parallelism, by the plan of the matrices that transformers ships with a model.

    embedding          rows of the vocabulary on each rank; its output is a part of the row's tokens
    norms, routers     whole; they compute that part, as do whole experts
    attention, MLP     each is a region: its input is gathered, and its last matrix sums over the ranks, each of which
                       keeps its part of the tokens
    last norm          its output is gathered
    output layer       rows of the vocabulary on each rank; log-probabilities are normalised over all of them, see
                       `starling.policy.train.loss.logprobs`: logits are never gathered
    layer of scores    whole on each rank, which computes all scores

Whatever is whole has a part of its gradient on each rank: outside of regions that of the tokens of the rank, within
them that of its matrices. So all of them are summed over the ranks once per update, and nothing within a pass.

The plan is not trusted: the divided model computes a few tokens, forward and backward, as the whole one did before.
"""
