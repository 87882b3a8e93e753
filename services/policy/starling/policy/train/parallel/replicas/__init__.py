"""Steps that several replicas make together, and states that one of them takes from another."""
