"""The policy's hands: the line to the controller, the model, the publisher."""
