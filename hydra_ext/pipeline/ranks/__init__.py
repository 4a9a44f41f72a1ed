"""How ranks talk: topology, process groups, links and messages, failures, reduced gradients."""
