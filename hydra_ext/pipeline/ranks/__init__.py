"""Communication of ranks: topology, process groups, links and messages, failures, reductions of gradients."""
