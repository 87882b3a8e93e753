"""GenEval (arXiv:2310.11513): whether an image shows the objects of a prompt, in their number, colours and places."""
