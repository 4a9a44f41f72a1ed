"""Where gangs run: the seam to machines, this machine as a cluster of one node, and what a gang's processes do."""
