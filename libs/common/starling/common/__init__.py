"""What every Starling service shares: ids, errors, settings, the wire and the network."""
