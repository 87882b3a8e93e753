"""Transports: how the boxes of a snapshot travel from a source rank to a destination rank.

A transport is a server and a client that speak the messages of `messages`. To add one, implement
`base.TransportServer` over a `source.SnapshotSource` and `base.TransportClient`, and add both to `registry`;
`docs/how-to/extend/transport.md` shows it step by step, and `tests/unit/weightsync/transports` runs the same
conformance tests against each.
"""
